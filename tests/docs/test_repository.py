"""What the hosting site reads beside the README: the workflow, the forms of issues, SECURITY.md."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from typer.main import get_command

from snugvl.cli.app import app
from tests.docs.test_readme import block

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_python_that_we_name_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.", line)]
    job = read(GITHUB / "workflows" / "test.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == named
    assert {"run": ".ci/run"} in job["steps"]


def test_one_command_checks_everything() -> None:
    """`.ci/run` runs the README's block, and mypy's verdict counts although it runs beside pytest."""
    assert re.findall(r"\.venv/bin/(\w+)", block("tests")) == ["pip", "ruff", "ruff", "mypy", "pytest"]
    assert "&& wait $!" in block("tests")
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_commands_that_reporters_are_asked_for_exist() -> None:
    """Each with its options: a form that asks for what isn't there gets no answer."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    asked = set()
    for path in (*GITHUB.glob("ISSUE_TEMPLATE/*.yml"), ROOT / "SECURITY.md"):
        asked |= set(re.findall(r"`snugvl ([a-z]+)([^`]*)`", path.read_text(encoding="utf-8")))
    assert len(asked) >= 4
    for name, rest in asked:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, name


def test_forms_have_fields() -> None:
    for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml"):
        form = read(path)
        if path.name == "config.yml":
            assert "security/advisories" in form["contact_links"][0]["url"]
            continue
        assert form["name"]
        assert form["description"]
        assert [field["id"] for field in form["body"]] == list(
            dict.fromkeys(field["id"] for field in form["body"])
        )


def test_links_of_security_lead_somewhere() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for path, anchor in re.findall(r"\]\(([^)#]+)#([^)]+)\)", text):
        titles = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {title.lower().replace(" ", "-") for title in titles}, anchor
