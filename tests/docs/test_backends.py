"""docs/backends.md, docs/vllm.md and the README's table of models say what the code knows."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from snugvl.checkpoint.families import ARCHITECTURES, SUPPORTED
from snugvl.cli.app import app
from snugvl.planner.engines.vllm.rules import __file__ as flags_file
from snugvl.tasks.conventions import CONVENTIONS
from tests.docs.generated import FOLDER

BACKENDS = (FOLDER / "backends.md").read_text(encoding="utf-8")
VLLM = (FOLDER / "vllm.md").read_text(encoding="utf-8")
README = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
# vLLM's, and Ray's, that the page shows and nothing of ours sets.
FOREIGN = {"--distributed-executor-backend", "--address", "--head"}
TEXT = {
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "Phi3ForCausalLM": "Phi-3",
}


def rows() -> dict[str, list[str]]:
    """The table of models: family → native, planned, detect."""
    _, _, table = BACKENDS.partition("## Models\n\n")
    lines = [line for line in table.split("\n\n")[0].splitlines()[2:] if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {family: rest for family, *rest in cells}


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.family)
def test_every_familys_boxes_and_engines_are_told(convention: object) -> None:
    family, architectures = convention.family, convention.architectures  # type: ignore[attr-defined]
    native, planned, detect = rows()[family]
    assert detect.startswith("yes") == (convention.named is not None)  # type: ignore[attr-defined]
    assert (native != "no") == bool(set(architectures) & set(SUPPORTED))
    assert (planned != "no") == bool(set(architectures) & set(ARCHITECTURES))


def test_everything_that_runs_natively_is_told_here_and_in_the_readme() -> None:
    families = {name: convention.family for convention in CONVENTIONS for name in convention.architectures}
    for architecture in SUPPORTED:
        family = families.get(architecture) or TEXT[architecture]
        assert any(family in row for row in rows()), architecture
        assert family in README, architecture


@pytest.mark.parametrize("page", ["backends.md", "vllm.md"])
def test_every_option_exists(page: str) -> None:
    text = (FOLDER / page).read_text(encoding="utf-8")
    command = get_command(app)
    ours = {
        option
        for sub in command.commands.values()  # type: ignore[attr-defined]
        for parameter in sub.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    flags = set(re.findall(r'"(--[a-z-]+)"', Path(flags_file).read_text(encoding="utf-8")))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert len(named) >= 5
    assert named - ours - flags - FOREIGN == set()
    shown = {flag for flag in flags if flag in VLLM}
    assert shown == flags, "docs/vllm.md explains every flag of the plan"
