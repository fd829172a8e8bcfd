"""docs/cli.md says what the program does."""

import json
import re

from snugvl.tasks.results import Answer, Caption, Detections, Scene
from tests.cli import help_pages

RESULTS = {"caption": Caption, "ask": Answer, "scene": Scene, "detect": Detections}


def page() -> str:
    return help_pages.PAGE.read_text(encoding="utf-8")


def test_the_reference_is_what_help_prints() -> None:
    generated = page().partition(help_pages.MARK)[2]
    assert generated == help_pages.reference(), "stale: run python -m tests.cli.help_pages"


def test_every_option_is_in_the_reference_once_or_by_its_name() -> None:
    sections = dict(re.findall(r"### `?([a-z -]+|Common options)`?\n```\n(.*?)\n```\n", page(), re.DOTALL))
    listed = help_pages.options_of(help_pages.OPTIONS + sections["Common options"])
    common = [help_pages.name_of(each) for each in listed]
    assert len(common) == len(set(common)), "two explanations of one option"
    for command in help_pages.COMMANDS:
        own, _, named = sections[" ".join(("snugvl", *command))].partition("Common options: ")
        for option in help_pages.options_of(help_pages.help_of(*command)):
            explained = help_pages.plain(option) in help_pages.plain(own)
            assert explained or help_pages.name_of(option) in named.replace(",", "").split()


def test_the_reference_has_the_main_commands() -> None:
    names = {name for command in help_pages.COMMANDS for name in command}
    assert names >= {"caption", "ask", "scene", "detect"}


def test_the_example_records_are_valid() -> None:
    block = re.search(r"<!-- records -->\n```json\n(.*?)```", page(), re.DOTALL)
    assert block is not None
    seen = set()
    for line in block.group(1).splitlines():
        record = json.loads(line)
        seen.add(record["task"])
        if "result" in record:
            result = RESULTS[record["task"]].model_validate(record["result"])
            assert result.model_dump(mode="json", exclude={"usage"}) == record["result"]
            assert list(record) == ["image", "task", "model", "params", "result", "usage", "seconds"]
        else:
            assert list(record) == ["image", "task", "model", "params", "error"]
    assert seen == set(RESULTS)
