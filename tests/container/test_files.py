"""Dockerfile, compose.yaml and the systemd unit say only what is there; `dockerfile.py` builds the first."""

import configparser
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from snugvl.cli.app import app
from tests.container.dockerfile import REPOSITORY, steps

DOCKERFILE = list(steps((REPOSITORY / "Dockerfile").read_text("utf-8")))
COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text("utf-8"))
UNIT = REPOSITORY / "deploy" / "snugvl.service"


def of(kind: str) -> list[str]:
    """What the Dockerfile's instructions of a kind say."""
    return [rest for found, rest in DOCKERFILE if found == kind]


def check(words: list[str]) -> None:
    """A command line of ours: the command exists, and each of its options."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    known = {name for option in commands[words[0]].params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    sources = [name for rest in of("COPY") for name in rest.split()[:-1]]
    assert sorted(sources) == sorted(kept)
    for name in sources:
        assert subprocess.run(["git", "ls-files", "--error-unmatch", name], cwd=REPOSITORY).returncode == 0


def test_the_image_serves_with_a_key_and_not_as_root() -> None:
    command = json.loads(of("CMD")[-1])
    check(command)
    assert json.loads(of("ENTRYPOINT")[0]) == ["snugvl"]
    assert "--api-key-file" in command
    assert of("USER") == ["snugvl"]


def test_a_compiler_and_headers_are_in_the_image() -> None:
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(of("RUN")[0].split())


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_compose_has_both_and_lets_only_this_machine_in(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["profiles"] == [name]
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert service["secrets"] == ["keys"] == list(COMPOSE["secrets"])
    assert ("deploy" in service) == (name == "gpu")
    arguments = service["build"].get("args", {}) if isinstance(service["build"], dict) else {}
    assert set(arguments) <= {rest.partition("=")[0] for rest in of("ARG")}


def test_the_unit_starts_what_there_is_and_the_docs_show_it() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[0] == "/opt/snugvl/bin/snugvl"
    check(words[1:])
    shown = re.search(r"```ini\n(.*?)```", Path(REPOSITORY / "docs/server.md").read_text("utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1] == UNIT.read_text("utf-8")
