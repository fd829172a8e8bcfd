"""Tables that the code knows are today's."""

import re
import shlex

import pytest
import typer

from snugvl.cli.app import app
from snugvl.planner.settings import Settings
from snugvl.server import errors
from snugvl.server.app import create_app
from snugvl.server.context import Context
from snugvl.server.media.loading import MediaLoader
from snugvl.server.settings import ServerSettings
from tests.docs import generated
from tests.server.fake import FakeService

SERVER = generated.FOLDER.parent / "src" / "snugvl" / "server"


@pytest.mark.parametrize("path", generated.pages(), ids=lambda path: path.name)
def test_generated_tables_are_todays(path: generated.Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert page == generated.written(page), "stale: run python -m tests.docs.generated"


def test_every_table_has_its_place() -> None:
    placed = [name for path in generated.pages() for name in generated.names(path.read_text("utf-8"))]
    assert sorted(placed) == sorted(generated.SECTIONS)


def test_every_field_is_named() -> None:
    page = (generated.FOLDER / "api.md").read_text(encoding="utf-8")
    for request in (*generated.REQUESTS.values(), *generated.OTHER_REQUESTS):
        for field in request.model_fields:
            assert re.search(rf"[`\"]{field.removesuffix('_')}[`\"]", page), f"{request.__name__}.{field}"


def test_every_error_is_in_the_table() -> None:
    table = generated.error_table()
    source = "".join(path.read_text("utf-8") for path in SERVER.rglob("*.py"))
    codes = {*re.findall(r'code="(\w+)"', source), *errors.VALIDATION_CODES.values()}
    statuses = set(re.findall(r"HTTPException\(\s*(\d+)", source))
    assert {"invalid_form", "invalid_json"} <= codes
    assert {"403", "415"} <= statuses
    for word in codes:
        assert f"| `{word}` |" in table, word
    for status in statuses:
        assert f"| {status} |" in table, status


def test_every_setting_of_a_plan_is_named() -> None:
    page = (generated.FOLDER / "plan.md").read_text(encoding="utf-8")
    _, _, listed = page.partition("\n`settings`: ")
    listed, _, _ = listed.partition(". A component:")
    assert re.findall(r"`(\w+)`", listed) == list(Settings._fields)


def test_every_route_is_named() -> None:
    settings = ServerSettings()
    app = create_app(Context(FakeService(), settings, MediaLoader.from_settings(settings)))
    page = (generated.FOLDER / "api.md").read_text(encoding="utf-8")
    for path in app.openapi()["paths"]:
        last = path.rpartition("/")[2]
        assert f"`{path}`" in page or f"`/{last}`" in page or f" {path}`" in page, path


def commands() -> list[tuple[str, list[str]]]:
    """Every `snugvl …` line of the documentation's shell blocks, as words."""
    found = []
    for path in generated.pages():
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            for line in block.splitlines():
                line = line.rpartition(".venv/bin/")[2]
                if line.startswith("snugvl "):
                    found.append((path.name, shlex.split(line, comments=True)))
    return found


def test_commands_have_the_options_that_the_documentation_gives_them() -> None:
    main = typer.main.get_command(app)
    assert len(commands()) > 15
    for page, words in commands():
        command = main.commands[words[1]]  # type: ignore[attr-defined]
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for word in words[2:]:
            if word.startswith("-") and word != "-":
                assert word.partition("=")[0] in known | {"--help"}, f"{page}: {' '.join(words)}"
