"""No protocol stands on another: what they share lies above them."""

import ast
import subprocess
import sys
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
    for path in [*(SERVER / protocol).glob("*.py"), *SERVER.glob(f"{protocol}.py")]:
        for name in imports(path):
            for other in PROTOCOLS - {protocol}:
                assert not name.startswith(f"snugvl.server.{other}"), f"{path.name} imports {name}"


def test_what_they_share_imports_none_of_them() -> None:
    for path in SERVER.glob("*.py"):
        if path.name not in ("app.py", "vision.py"):  # which puts them together; one of them
            for name in imports(path):
                assert not name.startswith(tuple(f"snugvl.server.{p}" for p in PROTOCOLS)), path.name


def test_the_server_starts_without_what_is_slow_to_import() -> None:
    """`openai` alone took as long as the rest of the server."""
    script = "import sys, snugvl.server.app, snugvl.server.run; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"openai", "torch", "transformers", "numpy"} & set(run.stdout.split())
