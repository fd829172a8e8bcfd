"""The table of clients names what the scripts import, and no script is left out of it."""

import re

import pytest

from tests.clients.conftest import SCRIPTS
from tests.docs import clients

# What a distribution is imported as, where that isn't its name.
MODULES = {
    "pydantic-ai-slim": "pydantic_ai",
    "openai-agents": "agents",
    "haystack-ai": "haystack",
    "llama-index-llms-openai-like": "llama_index.llms.openai_like",
    "llama-index-llms-ollama": "llama_index.llms.ollama",
}


def test_every_script_is_in_the_table() -> None:
    there = {path.name for path in SCRIPTS.glob("*.*") if path.suffix in (".py", ".mjs")}
    assert {path.name for path, _, _ in clients.scripts()} == there - {"about.py", "together.py"}


@pytest.mark.parametrize("path", [path for path, _, _ in clients.scripts()], ids=lambda path: path.name)
def test_a_script_imports_what_its_heading_names(path: clients.Path) -> None:
    text = path.read_text("utf-8")
    for name in clients.heading(path).packages:
        if path.suffix == ".mjs":
            assert re.search(rf'from "{re.escape(name)}[/"]', text), name
        else:
            module = MODULES.get(name, name.replace("-", "_"))
            used = rf'(import|from) {re.escape(module)}\b|"-m", "{re.escape(module)}"'
            assert re.search(used, text), name
