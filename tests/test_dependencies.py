"""What the package imports is what `pyproject.toml` declares, and what CI installs is pinned."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# pydantic pins its core to the digit; torch brings triton where there is a GPU for it.
GIVEN_BY_ANOTHER = {"pydantic-core", "triton"}
# Needed without an import: found by name, or by the library that wants it.
NOT_IMPORTED = {"safetensors", "socksio"}


def normal(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(lines: list[str]) -> set[str]:
    """Names of requirements."""
    return {normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}


def imported() -> set[str]:
    """Distributions that the package imports, also inside of functions; parsing would take seconds."""
    modules = set[str]()
    for path in (ROOT / "src").rglob("*.py"):
        modules.update(
            re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
    known = packages_distributions()
    foreign = modules - set(sys.stdlib_module_names) - {"snugvl"}
    return {normal(known[module][0]) for module in foreign if module in known} - {"snugvl"}


def test_every_import_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    optional = [line for name, lines in extras.items() if name != "dev" for line in lines]
    required = declared(PROJECT["dependencies"])
    found = imported()
    missing = found - required - GIVEN_BY_ANOTHER - declared(optional)
    assert not missing
    assert required <= found | NOT_IMPORTED


def pins(file: Path) -> dict[str, str]:
    """The exact versions that a file of constraints has itself, by name."""
    lines = file.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line and not line.startswith(("#", "-c "))]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in kept)
    found = {normal(name): version for name, _, version in (line.partition("==") for line in kept)}
    assert len(found) == len(kept)
    return found


def test_every_dependency_is_pinned() -> None:
    users, developers = (set(pins(ROOT / f"constraints{name}.txt")) for name in ("", "-dev"))
    assert not users & developers
    assert declared(PROJECT["dependencies"]) <= users
    assert declared(PROJECT["optional-dependencies"]["dev"]) <= users | developers
