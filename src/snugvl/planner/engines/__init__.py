"""The planner's knowledge of engines, a folder each. No module outside of them compares an engine's name."""

from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, get_args

from snugvl.core.options import Engine, special, typed
from snugvl.errors import RequestError

if TYPE_CHECKING:
    from snugvl.planner.engines.rules import EngineRules

PREFERRED: Final[Engine] = "native"  # of a command that names none


@cache
def rules_of(engine: Engine) -> "EngineRules":
    """The rules of an engine, from its folder, imported when they are first asked for."""
    rules: EngineRules = import_module(f"snugvl.planner.engines.{engine}.rules").RULES
    return rules


def having(names: Collection[str]) -> "list[EngineRules]":
    """Rules of the engines that can do all options of `names`, which are options not every engine can do."""
    every = map(rules_of, get_args(Engine))
    return [rules for rules in every if rules.honours.issuperset(names)]


def lacking(engine: Engine, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `asked`, by name and value, that this engine can't do and others can."""
    honours = rules_of(engine).honours
    return {name: value for name, value in special(asked).items() if name not in honours}


def worded(asked: Mapping[str, Any]) -> str:
    """Options with their values, and the verb: `--tower streamed and --embedding cpu are`."""
    said = (" ".join(typed(name, value)) for name, value in asked.items())
    return f"{' and '.join(said)} {'is' if len(asked) == 1 else 'are'}"


def for_others(engine: Engine, asked: Mapping[str, Any]) -> str | None:
    """The clause that some options are for other engines alone, and which: "--tower streamed is for … alone".

    None where this engine can do all that is asked.
    """
    if not (lacks := lacking(engine, asked)):
        return None
    names = [each.title for each in having(lacks)]
    able = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{worded(lacks)} for {able} alone"


def refuse_lacking(
    engine: Engine, asked: Mapping[str, Any], *, why: str = "", in_process: bool = False
) -> None:
    """Refuse options that an engine can't do and others can. `why`: how it came to be this engine;
    `in_process`: name no engines but those that run in the process that asks.

    Raises:
        RequestError: names the options, the engine, and the engines to take instead. Engines that read GGUF
            files alone are not named: they don't run what another engine would.
    """
    if not (lacks := lacking(engine, asked)):
        return
    instead = [each for each in having(lacks) if not each.reads_only_gguf]
    names = " or ".join(each.engine for each in instead if each.in_process or not in_process)
    raise RequestError(
        f"{worded(lacks)} not for {rules_of(engine).title}{f' ({why})' if why else ''}; say --backend "
        f"{names}, or leave {'it' if len(lacks) == 1 else 'them'} out",
        field=next(iter(lacks)),
    )
