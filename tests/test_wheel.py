"""The wheel that a release ships: it has what it needs, and runs where only it is installed."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from snugvl.version import __version__
from tests.docs.test_readme import ROOT, block
from tests.patience import PATIENCE_S

# Archives that aren't compressed, which is nine tenths of the time of making one.
BUILD = """
import sys, zlib
from hatchling.cli import hatchling
compressobj = zlib.compressobj
zlib.compressobj = lambda level, *rest: compressobj(0, *rest)
sys.exit(hatchling())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout, in this environment, which needs no package index for it."""
    out = tmp_path_factory.mktemp("dist")
    words = ["-c", BUILD, "build", "-t", "wheel", "-d", str(out)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_S)
    (built,) = out.glob("*.whl")
    return built


def test_it_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"snugvl-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if not name.startswith("snugvl-")}
        licences = {Path(name).name for name in packed.namelist() if "/licenses/" in name}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/snugvl"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    there = {name.removeprefix("src/") for name in listed if (ROOT / name).exists()}
    assert inside == there
    assert "LICENSE" in licences
    assert "snugvl/py.typed" in inside


def test_a_source_archive_builds_the_same_wheel_and_has_no_test(wheel: Path, tmp_path: Path) -> None:
    """Tests were in it without the documents and benchmarks that they read."""
    build = [sys.executable, "-c", BUILD, "build", "-d", str(tmp_path)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_S)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    assert sorted(path.name for path in source.iterdir() if path.is_dir()) == ["examples", "src"]
    subprocess.run([*build, "-t", "wheel"], cwd=source, check=True, capture_output=True, timeout=PATIENCE_S)
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(tmp_path / wheel.name) as theirs:
        assert {each.filename: each.CRC for each in ours.infolist()} == {
            each.filename: each.CRC for each in theirs.infolist()
        }


@pytest.mark.extended
@pytest.mark.slow
def test_it_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are lent from here; this checkout isn't: what answers is in the new environment."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    words = ["--python", venv / "bin" / "python", "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=PATIENCE_S)
    # A `.pth` file's folders don't have their own `.pth` files read, which is where an editable snugvl is.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def typed(*command: str) -> str:
        ran = subprocess.run(
            [str(venv / "bin" / command[0]), *command[1:]],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    where = typed("python", "-c", "import snugvl; print(snugvl.__file__)")
    assert Path(where.strip()).is_relative_to(venv)
    assert typed("snugvl", "--version") == f"snugvl {__version__}\n"
    assert "Qwen" in typed("snugvl", "plan", "--gpu", "rtx-3060", "--offline")
    name, *rest = block("run").split()
    assert name == "snugvl"
    assert typed(name, *[str(ROOT / word) if word.endswith(".png") else word for word in rest]) == block(
        "prints"
    )
