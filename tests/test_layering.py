"""One direction only, and nothing slow before it is needed: checked on the imports themselves."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from snugvl.checkpoint.catalogue import catalogue_facts, entries
from snugvl.checkpoint.families import FAMILIES

SOURCE = Path(__file__).parent.parent / "src" / "snugvl"

# A room may import the rooms that are listed for it, and `core` and `errors`, which know nobody.
ALLOWED = {
    "core": set(),
    "layers": set(),
    "checkpoint": set(),
    "hardware": set(),
    "planner": {"checkpoint", "hardware"},
    "diagnose": {"planner", "checkpoint", "hardware"},
    "models": {"layers", "checkpoint"},
    "engine": {"models", "layers", "checkpoint"},
    "inputs": {"engine", "models", "checkpoint"},
    "backends": {"engine", "models", "layers", "inputs", "checkpoint", "diagnose", "hardware", "planner"},
    "tasks": {"inputs", "checkpoint.image_rules", "checkpoint.families"},
    "fidelity": {
        "backends.native", "backends.place", "tasks", "inputs", "engine", "models", "layers", "checkpoint",
        "planner",
    },
    "quantize": {
        "fidelity", "backends.place", "engine", "models", "layers", "checkpoint", "planner",
    },
    "server": {
        "tasks", "inputs.image", "inputs.frames", "inputs.looks_like", "inputs.tools",
        "inputs.trials", "checkpoint",
    },
    "client": {"tasks", "inputs.image", "inputs.frames", "inputs.given", "inputs.looks_like", "inputs.talk"},
    "bench": {"client", "hardware"},
    "cli": {
        "server", "bench", "client", "fidelity", "quantize", "tasks", "inputs", "checkpoint", "hardware",
        "planner", "diagnose",
        "backends.child", "backends.llamacpp", "backends.process", "backends.vllm", "loading", "model",
    },
}  # fmt: skip
# The modules of the root: what they may import, over their names.
ROOT = {
    "__init__": {"model", "loading", "client", "tasks", "inputs"},
    "__main__": {"cli.entry"},
    "errors": set(),
    "version": set(),
    "model": {"tasks", "inputs", "client", "backends"},
    "loading": {"model", "checkpoint", "backends", "planner.engines"},
}
KNOWN = {"core", "errors", "version"}
# Modules that say a name which is a family's as well, and what it is there. This list may only shrink.
HOMONYMS = {
    "checkpoint/gguf_facts.py": {"qwen2", "qwen35"},  # llama.cpp's names of ways to cut text
    "core/messages.py": {"llama", "mistral"},  # forms of calls of tools, as in `inputs/tools/forms.py`
    "inputs/tools/forms.py": {"llama", "mistral"},
    "diagnose/facts.py": {"llama"},  # how names of models begin in logs
}
# Rings, the innermost first: a room imports from inner rings, and of its own ring nothing but itself.
RINGS = (
    {"errors", "version"},
    {"core"},
    {"checkpoint", "hardware", "layers"},
    {"models", "planner"},
    {"diagnose", "engine"},
    {"inputs"},
    {"tasks", "backends"},
    {"client", "fidelity", "server"},
    {"bench", "quantize"},
    {"cli"},
)
# What still points outwards or sideways. It only shrinks: an entry that nothing needs fails.
OUTWARDS: set[tuple[str, str]] = set()
# Parts that work without torch: a fresh interpreter imports every module of them.
TORCHLESS = ("bench", "checkpoint", "client", "core", "diagnose", "hardware", "planner", "tasks")
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


@cache
def imports(path: Path) -> set[str]:
    """Modules of snugvl that a file imports, relative to the package; by lines, as parsing takes seconds."""
    lines = re.findall(
        r"^\s*(?:from|import) snugvl\.([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    return set(lines)


def below(name: str, rooms: set[str]) -> bool:
    """Whether a module is of one of these rooms."""
    return any(name == room or name.startswith(room + ".") for room in rooms)


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    for path in (SOURCE / room).rglob("*.py"):
        for name in imports(path):
            assert below(name, {room, *KNOWN, *ALLOWED[room]}), f"{path.name} imports snugvl.{name}"


@pytest.mark.parametrize("module", ROOT)
def test_a_module_of_the_root_imports_only_what_is_below_it(module: str) -> None:
    for name in imports(SOURCE / f"{module}.py"):
        assert below(name, KNOWN | ROOT[module]), f"{module}.py imports snugvl.{name}"


def test_rooms_point_inwards() -> None:
    place = {room: number for number, ring in enumerate(RINGS) for room in ring}
    found = set()
    for room in ALLOWED:
        for path in (SOURCE / room).rglob("*.py"):
            for name in imports(path):
                other = name.split(".")[0]
                if other != room and other in place and place[other] >= place[room]:
                    found.add((room, name))
    assert found == OUTWARDS
    assert set(ALLOWED) | {"errors", "version"} == set(place)


def test_every_room_is_covered() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert rooms <= set(ALLOWED)
    assert {path.stem for path in SOURCE.glob("*.py")} == set(ROOT)


def test_no_two_rooms_import_each_other() -> None:
    above = {room: {name.split(".")[0] for name in ALLOWED[room]} for room in ALLOWED}
    for room, rooms in above.items():
        for other in rooms & set(ALLOWED):
            assert room not in above[other] or other == "hardware", f"{room} and {other} import each other"


@pytest.mark.parametrize("module", ["engine", "models", "layers"])
def test_the_engine_knows_nothing_of_asyncio_http_or_text(module: str) -> None:
    for path in (SOURCE / module).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in ("asyncio", "httpx", "fastapi", "tokenizers", "jinja2"):
            assert f"import {name}" not in text, f"{path.name} imports {name}"


def families_named() -> set[str]:
    """Names by which families, their architectures and their towers go, here and in files."""
    names = {plan for family in FAMILIES for plan in (*family.traits, *family.prompting, *family.gguf)}
    names |= {other for family in FAMILIES for traits in family.traits.values() for other in traits.gguf}
    return names.union(*({*family.architectures, *family.projectors} for family in FAMILIES))


def words_of(path: Path, among: set[str]) -> set[str]:
    """Literal strings of a module but its docstrings, and what in them is spelled as an architecture; of a
    script, and where none of `among` is in the text, all words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".js" or not any(name in text for name in among):
        return set(re.findall(r"[\w.-]+", text))
    tree = ast.parse(text)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    literals = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    }
    return literals | set(re.findall(r"\b[A-Z]\w+For\w+\b", " ".join(literals)))


def test_nobody_but_the_families_says_a_familys_name() -> None:
    rooms = SOURCE / "checkpoint" / "families"
    modules = [path for path in SOURCE.rglob("*.py") if rooms not in path.parents]
    scripts = (SOURCE / "server" / "page" / "static").glob("*.js")
    names, said = families_named(), {}
    for path in (*modules, *scripts):
        if found := words_of(path, names) & names:
            said[path.relative_to(SOURCE).as_posix()] = found
    assert said == HOMONYMS


def test_only_a_familys_network_imports_its_module() -> None:
    shared = {"families", "families.traits", "families.decoder"}
    rooms = (SOURCE / "checkpoint" / "families", SOURCE / "models")
    for path in SOURCE.rglob("*.py"):
        if not set(rooms) & set(path.parents):
            mine = {name for name in imports(path) if name.startswith("checkpoint.families")}
            assert mine <= {f"checkpoint.{name}" for name in shared}, path.name


def test_every_planned_family_says_its_traits() -> None:
    known = {name for family in FAMILIES for name in family.traits}
    planned = [catalogue_facts(entry.name) for entry in entries()]
    assert {facts.family for facts in planned if facts is not None} <= known


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


def test_parts_without_torch_are_imported_without_it() -> None:
    """All of their modules in one fresh interpreter, so that none is forgotten."""
    modules = sorted(
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for room in TORCHLESS
        for path in (SOURCE / room).rglob("*.py")
    )
    assert len(modules) > 100
    loaded = modules_after("\n".join(f"import {name}" for name in modules))
    assert not [name for name in ("torch", "transformers", "triton") if name in loaded]
