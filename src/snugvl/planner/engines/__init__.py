"""An engine a folder: what the planner knows of it. Nobody outside of them compares an engine's name."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snugvl.planner.engines.rules import EngineRules
    from snugvl.planner.settings import Engine


@cache
def rules_of(engine: "Engine") -> "EngineRules":
    """The rules of an engine, from its folder, imported when they are first asked for."""
    rules: EngineRules = import_module(f"snugvl.planner.engines.{engine}.rules").RULES
    return rules
