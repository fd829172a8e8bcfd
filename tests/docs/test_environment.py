"""docs/environment.md lists every environment variable that the code reads or speaks of."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.generated import FOLDER

ROOT = FOLDER.parent
NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|PATH|LOCALAPPDATA|SYSTEMROOT|PYTHON[A-Z]+|container")
SPOKEN_OF = re.compile(r"\b(?:SNUGVL|HF|HUGGINGFACE|XDG)_[A-Z_]*[A-Z]\b")
# Read by libraries: httpx, huggingface_hub, and pytest's users.
OF_LIBRARIES = {"ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "CI"}
# Words of vLLM's and Linux' that are no variables of ours, set by us, or written for other programs.
FOREIGN = {"LLAMA_API_KEY"} | {"MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PCI_BUS_ID"}


def reads_environment(node: ast.AST) -> bool:
    return any(
        (isinstance(part, ast.Attribute) and part.attr in ("environ", "getenv"))
        or (isinstance(part, ast.Name) and part.id == "environ")
        for part in ast.walk(node)
    )


def strings(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def variables_in(path: Path) -> set[str]:
    """Names that functions beside `environ` hold, that options take, and that messages speak of."""
    text = path.read_text(encoding="utf-8")
    if not SPOKEN_OF.search(text) and not re.search("environ|envvar", text, re.IGNORECASE):
        return set()
    tree = ast.parse(text)
    found = {name for text in strings(tree) for name in SPOKEN_OF.findall(text)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "envvar":
            found |= set(strings(node.value))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and reads_environment(node):
            found |= {text for text in strings(node) if NAME.fullmatch(text)}
        elif isinstance(node, ast.Assign) and "ENVIRONMENT" in ast.unparse(node.targets[0]):
            found |= set(strings(node.value))
    return found


@cache
def variables() -> set[str]:
    paths = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests" / "server" / "page").rglob("*.py")]
    return set().union(*map(variables_in, paths)) - FOREIGN


def documented() -> set[str]:
    page = (FOLDER / "environment.md").read_text(encoding="utf-8")
    words = set(re.findall(r"`([^`\s]+)`", page))
    return {word for word in words if NAME.fullmatch(word) or word in OF_LIBRARIES}


def test_every_variable_is_documented() -> None:
    assert {"SNUGVL_MODEL", "HF_TOKEN", "CUDA_VISIBLE_DEVICES"} <= variables()
    assert variables() - documented() == set()


def test_every_documented_variable_exists() -> None:
    assert documented() - variables() - OF_LIBRARIES == set()
