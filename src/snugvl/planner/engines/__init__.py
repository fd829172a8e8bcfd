"""An engine a folder: what the planner knows of it. Nobody outside of them compares an engine's name."""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, get_args

from snugvl.core.options import Engine, special

if TYPE_CHECKING:
    from snugvl.planner.engines.rules import EngineRules

PREFERRED: Final[Engine] = "native"  # of a command that names none


@cache
def rules_of(engine: Engine) -> "EngineRules":
    """The rules of an engine, from its folder, imported when they are first asked for."""
    rules: EngineRules = import_module(f"snugvl.planner.engines.{engine}.rules").RULES
    return rules


def beyond(engine: Engine, said: Mapping[str, Any]) -> dict[str, Any]:
    """Options that an engine can't do and another one can, of those that were said, by name and value."""
    return {name: value for name, value in special(said).items() if name not in rules_of(engine).honours}


def engines_with(names: Iterable[str]) -> list[Engine]:
    """Engines that can do all of these options, the preferred one first."""
    found: list[Engine] = [each for each in get_args(Engine) if rules_of(each).honours.issuperset(names)]
    return sorted(found, key=lambda each: -rules_of(each).rank)


def owners(names: Iterable[str]) -> str:
    """Engines that can do all of these options, for people."""
    engines = engines_with(names)
    return "our own engine" if engines == [PREFERRED] else " and ".join(engines)
