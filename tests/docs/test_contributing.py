"""CONTRIBUTING.md, and what docstrings name: commands select what they say, names are there."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.docs.generated import FOLDER, pages
from tests.test_layering import ALLOWED

ROOT = FOLDER.parent
SOURCE = ROOT / "src" / "snugvl"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def expressions() -> set[str]:
    """What is asked of marks wherever a command is written down."""
    files = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]
    found = {match[1] or match[2] for text in texts for match in re.finditer(r"-m (?:'([^']+)'|(\w+))", text)}
    return {each for each in found if re.search("slow|extended", each)}


@pytest.mark.parametrize("expression", sorted(expressions()))
def test_no_command_runs_extended_tests_but_those_that_name_them(expression: str) -> None:
    """`-m` of a command replaces that of pyproject.toml: 'not slow' alone would run what takes minutes."""
    asked = Expression.compile(expression)
    for slow in (False, True):
        marks = {"extended": True, "slow": slow}
        assert asked.evaluate(lambda name, **_: marks[name]) == (expression == "extended")  # noqa: B023


def test_there_are_such_commands() -> None:
    assert {"extended", "not slow and not extended"} <= expressions()


def test_each_arrow_is_a_way_that_imports_may_go_and_none_goes_back() -> None:
    (line,) = re.findall(r"One direction only:(.*?)`tests/test_layering.py`", CONTRIBUTING, re.DOTALL)
    chains = [re.findall(r"`(\w+)`", chain) for chain in re.findall(r"`\w+`(?:\s*→\s*`\w+`)+", line)]
    assert sum(map(len, chains)) >= 8
    for chain in chains:
        for at, room in enumerate(chain):
            assert all(_allows(room, below) for below in chain[at + 1 : at + 2]), room
            assert not any(_allows(below, room) for below in chain[at + 1 :]), room


def _allows(room: str, other: str) -> bool:
    return any(allowed == other or allowed.startswith(f"{other}.") for allowed in ALLOWED[room])


def test_every_script_that_is_listed_is_there() -> None:
    table = re.findall(r"^\| (.*?) \|", CONTRIBUTING.partition("## Measure")[2], re.MULTILINE)
    scripts = [name for cell in table for name in re.findall(r"`([\w./-]+\.(?:py|sh))", cell)]
    assert len(scripts) > 20
    assert [name for name in scripts if not (ROOT / "benchmarks" / name).resolve().exists()] == []


MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`")


def members() -> dict[str, set[str]]:
    """Classes that some remark names and that inherit nothing, and the names of what each has."""
    texts = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")]
    owners = {owner for text in texts for owner, _ in MEMBER.findall(text)}
    found: dict[str, set[str]] = {}
    inheriting = set[str]()
    for text in texts:
        if owners.isdisjoint(re.findall(r"^ *class (\w+)", text, re.MULTILINE)):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef) or node.name not in owners:
                continue
            inheriting |= {node.name} if node.bases else set()
            names = found.setdefault(node.name, set())
            for each in ast.walk(node):
                match each:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        names.add(name)
                    case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                        names.add(name)
    return {name: each for name, each in found.items() if name not in inheriting}


def remarks(path: Path) -> Iterator[str]:
    """Docstrings and comments of a module, where something in it names a member."""
    text = path.read_text(encoding="utf-8")
    if not MEMBER.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_docstrings_name_members_that_there_are() -> None:
    known, named, gone = members(), 0, []
    for path in SOURCE.rglob("*.py"):
        for remark in remarks(path):
            for owner, name in MEMBER.findall(remark):
                named += owner in known
                if owner in known and name not in known[owner]:
                    gone.append(f"{path.relative_to(SOURCE)}: {owner}.{name}")
    assert named > 20
    assert not gone
