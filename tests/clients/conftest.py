"""Environments for foreign clients, installed once and kept, and the servers they talk to.

Without a way to the package registries the tests are skipped with that reason; in CI they fail.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from uv import find_uv_bin

from tests.clients.scripted import willing_engine
from tests.missing import missing
from tests.patience import PATIENCE_S
from tests.server.conftest import data_url, picture, pocket, url  # noqa: F401
from tests.server.live import live

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
REQUIREMENTS = HERE / "requirements.txt"
FRAMEWORK_REQUIREMENTS = HERE / "requirements-frameworks.txt"
EXTENDED_REQUIREMENTS = HERE / "requirements-extended.txt"
LOCK = SCRIPTS / "package-lock.json"
CACHE = Path.home() / ".cache" / "snugvl-foreign-clients"


@pytest.fixture(scope="session")
def foreign_python() -> Path:
    """The interpreter of an environment with every Python client that CI runs."""
    return python_with(REQUIREMENTS, "python")


@pytest.fixture(scope="session")
def framework_python() -> Path:
    """The interpreter of an environment with the programs that stand on the official Python clients."""
    return python_with(FRAMEWORK_REQUIREMENTS, "frameworks")


@pytest.fixture(scope="session")
def extended_python() -> Path:
    """The interpreter of an environment with the Python clients of the extended group."""
    return python_with(EXTENDED_REQUIREMENTS, "extended")


@pytest.fixture(scope="session")
def foreign_node() -> Path:
    """A folder with the scripts for Node, and what they import."""
    if shutil.which("npm") is None:
        missing("npm and Node 20 or later are not installed")

    def install(folder: Path) -> None:
        for file in ("package.json", "package-lock.json"):
            shutil.copy(SCRIPTS / file, folder)
        run("npm", "ci", "--no-audit", "--no-fund", cwd=folder)

    return installed("node", LOCK, install)


@pytest.fixture(scope="session")
def willing_url() -> Iterator[str]:
    """A server whose model calls a tool without being told to."""
    with live(willing_engine()) as base:
        yield base


def python_with(requirements: Path, name: str) -> Path:
    """The interpreter of an environment with exactly these packages, kept under this name."""

    def install(folder: Path) -> None:
        # Pip would take ten times as long.
        run(find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
        options = ("--quiet", "--no-deps", "--python", str(folder / "venv" / "bin" / "python"))
        run(find_uv_bin(), "pip", "install", *options, "-r", str(requirements))

    kind = f"{name}{sys.version_info.major}.{sys.version_info.minor}"
    return installed(kind, requirements, install) / "venv" / "bin" / "python"


def installed(kind: str, pins: Path, install: Callable[[Path], None]) -> Path:
    """The folder that `install` filled, for these pins, in this run or an earlier one."""
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()[:16]
    folder = CACHE / f"{kind}-{digest}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f"{kind}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                install(folder)
            except subprocess.CalledProcessError as error:
                missing(f"the clients can't be installed: {error.stderr.strip()[-500:]}")
            (folder / "complete").touch()
    return folder


def run(*command: str, cwd: Path | None = None) -> str:
    """What a command prints; it must succeed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI", "ANTHROPIC"))}
    environment = kept | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=True, timeout=2 * PATIENCE_S
    ).stdout
