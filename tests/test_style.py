"""What ruff and mypy don't look at: sizes of modules, and how docstrings begin."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 800
LEANING = (
    *("Of ", "The same", "Those ", "What ", "Whoever ", "Nobody "),
    *("As ", "By ", "It ", "Its ", "Nothing to ", "With ", "Without "),
)


def test_files_stay_small() -> None:
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "training").rglob("*.py")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines; split it"


def test_docstrings_stand_alone() -> None:
    """The first words name the subject: not "the same" as in a neighbour that a reader hasn't seen, and no
    clause in its place ("What a step computes")."""
    begins_so = re.compile(rf"[\"']\s*({'|'.join(LEANING)})")
    leaning = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in (ROOT / "src").rglob("*.py")
        # To read a file takes a hundredth of the time of parsing it.
        if begins_so.search(source := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and text.startswith(LEANING)
    ]
    assert leaning == []
