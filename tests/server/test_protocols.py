"""No protocol stands on another: what they share lies above them."""

import ast
from pathlib import Path

import pytest

import snugvl.server

SERVER = Path(snugvl.server.__file__).parent
PROTOCOLS = {"openai", "anthropic", "ollama", "vision", "page"}


def imports(path: Path) -> set[str]:
    """Modules that a file imports from."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_no_protocol_imports_another(protocol: str) -> None:
    for path in (SERVER / protocol).glob("*.py"):
        for name in imports(path):
            for other in PROTOCOLS - {protocol}:
                assert not name.startswith(f"snugvl.server.{other}"), f"{path.name} imports {name}"


def test_what_they_share_imports_none_of_them() -> None:
    for path in SERVER.glob("*.py"):
        if path.name != "app.py":  # which puts them together
            for name in imports(path):
                assert not name.startswith(tuple(f"snugvl.server.{p}" for p in PROTOCOLS)), path.name
