"""One direction only, and nothing slow before it is needed: checked on the imports themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "snugvl"

# A room may import the rooms listed for it (and modules at the top: errors, sampling, config).
ALLOWED = {
    "core": {"hardware.sizes"},
    "layers": set(),
    "checkpoint": set(),
    "hardware": set(),
    "planner": {"checkpoint", "hardware"},
    "diagnose": {"planner", "checkpoint", "hardware"},
    "models": {"layers", "checkpoint"},
    "engine": {"models", "layers", "checkpoint"},
    "inputs": {"engine", "models", "checkpoint", "backends.protocol"},
    "backends": {
        "engine",
        "models",
        "inputs",
        "checkpoint",
        "diagnose",
        "hardware",
        "planner",
        "place",
        "allocation",
    },
    "tasks": {"backends.protocol", "inputs", "checkpoint.resize"},
    "server": {
        "tasks",
        "backends.protocol",
        "backends.service",
        "inputs.image",
        "inputs.tools",
        "checkpoint",
        "planner.plan",
    },
    "client": {"tasks", "backends.protocol", "backends.service", "inputs.image"},
    "bench": {"client", "hardware"},
    "cli": {
        "server",
        "bench",
        "backends.supervised",
        "backends.launch",
        "backends.service",
        "backends.vllm",
        "client",
        "tasks",
        "backends.protocol",
        "inputs",
        "checkpoint",
        "hardware",
        "planner",
        "diagnose",
    },
}
TOP = {"core", "errors", "sampling", "config", "version", "ledger", "timeline", "heap", "region"}
TOP_FOR_CLI = TOP | {"loading", "model"}
SLOW = (
    "torch",
    "transformers",
    "PIL",
    "numpy",
    "pydantic",
    "huggingface_hub",
    "tokenizers",
    "rich.progress",
    "fastapi",
    "uvicorn",
)


def imports(path: Path) -> set[str]:
    """Modules of snugvl that a file imports, relative to the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name.removeprefix("snugvl.") for name in found if name.startswith("snugvl.")}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    top = TOP_FOR_CLI if room == "cli" else TOP
    for path in (SOURCE / room).rglob("*.py"):
        for name in imports(path):
            below = any(name == good or name.startswith(good + ".") for good in ALLOWED[room])
            assert name.split(".")[0] in {room, *top} or below, f"{path.name} imports snugvl.{name}"


def test_every_room_is_covered() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert rooms <= set(ALLOWED)


@pytest.mark.parametrize("module", ["engine", "models", "layers"])
def test_the_engine_knows_nothing_of_asyncio_http_or_text(module: str) -> None:
    for path in (SOURCE / module).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in ("asyncio", "httpx", "fastapi", "tokenizers", "jinja2"):
            assert f"import {name}" not in text, f"{path.name} imports {name}"


def modules_after(code: str) -> set[str]:
    """Names in sys.modules after `code` in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import snugvl",
        "import snugvl.cli.app",
        "import snugvl.checkpoint.architecture, snugvl.checkpoint.safetensors, snugvl.checkpoint.locate",
    ],
)
def test_nothing_slow_is_imported_early(code: str) -> None:
    loaded = modules_after(code)
    assert not [name for name in SLOW if name in loaded]


def test_the_client_needs_no_torch() -> None:
    loaded = modules_after("import snugvl; snugvl.Client().close(); snugvl.AsyncClient()")
    assert not [name for name in ("torch", "transformers", "tokenizers", "fastapi") if name in loaded]
