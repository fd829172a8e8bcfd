"""A plan as JSON, schema version 1 (documented in docs/plan.md). Sizes are bytes, speeds per second.

`snugvl plan --save FILE` keeps it, readable for people and programs. `snugvl serve --plan FILE` takes the
model, the wishes and every setting of the choice from it; the footprint is computed again.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from snugvl.core.folders import json_object, read_small
from snugvl.core.options import LoadOptions
from snugvl.errors import InputError, RequestError
from snugvl.hardware.machine import Machine, read_value
from snugvl.planner.commands import load_options, next_command, plain_command
from snugvl.planner.engines.transformers.rules import placement
from snugvl.planner.footprint.total import Reason
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.report.sections import Measured, headline
from snugvl.planner.settings import Settings
from snugvl.planner.shortfall import why_engine
from snugvl.planner.wishes import Wishes

SCHEMA_VERSION = 1
MAX_PLAN_BYTES = 16 << 20  # of a saved plan
BUDGET = ("total_bytes", "held_bytes", "margin_bytes", "usable_bytes")
ROOFLINE = (
    "decode_tokens_per_s", "least", "most", "measured", "first_token_s", "crossing_bytes", "ddr",
)  # fmt: skip
# Names in the JSON of what is said of a reason, and its attributes.
REJECTION = {
    "what": "text", "short_bytes": "short_bytes", "blame": "blame", "blame_bytes": "blame_bytes",
    "remedy": "remedy", "model": "model",
}  # fmt: skip
VERDICT = {"engine": "engine", "reason": "text"}
REFUSAL = {"model": "model", **VERDICT}


def document(plan: Plan, machine: Machine, measured: Measured | None = None) -> dict[str, Any]:
    """The plan as JSON values."""
    budget, other = plan.budget, plan.other_tower
    return {
        "schema": SCHEMA_VERSION,
        "headline": headline(plan, machine),
        "fits": plan.choice is not None,
        "wishes": _wishes(plan.wishes),
        "machine": {"os": machine.os, "gpus": len(machine.gpus), "source": machine.source},
        "budget": {"device": budget.name, **{name: getattr(budget, name) for name in BUDGET}},
        "choice": _choice(plan.choice, measured) if plan.choice else None,
        "load": load_options(plan.choice, plan.wishes).said() if plan.choice else None,
        "command": next_command(plan.choice, plan.wishes) if plan.choice else None,
        "plain_command": plain_command(plan.choice) if plan.choice else None,
        "closest": _choice(plan.closest, measured) if plan.closest else None,
        "runners_up": [_choice(choice, measured) for choice in plan.runners_up],
        "rejections": [_named(each, REJECTION) for each in plan.rejections],
        "engines": [_named(each, VERDICT) for each in plan.verdicts],
        "why": why_engine(plan) if plan.choice else None,
        "instead": _choice(plan.instead, measured) if plan.instead else None,
        "beside": _choice(plan.beside, measured) if plan.beside else None,
        "ours": _choice(plan.ours, measured) if plan.ours else None,
        "quicker": _choice(plan.quicker, measured) if plan.quicker else None,
        "held": _choice(plan.held, measured) if plan.held else None,
        "roomier": _choice(plan.roomier, measured) if plan.roomier else None,
        "streamed": _choice(other, measured) if other and other.option.streams else None,
        "resident": _choice(other, measured) if other and not other.option.streams else None,
        "refusals": [_named(each, REFUSAL) for each in plan.refusals],
    }


def _wishes(wishes: Wishes) -> dict[str, Any]:
    """The wishes by name, and the options beside them under their own names."""
    values = asdict(wishes)
    del values["also"]
    return values | dict(wishes.also)


def _named(reason: Reason, names: Mapping[str, str]) -> dict[str, Any]:
    return {name: getattr(reason, attribute) for name, attribute in names.items()}


def _choice(choice: Choice, measured: Measured | None) -> dict[str, Any]:
    return {
        "model": choice.option.model.name,
        "stored_format": choice.option.stored_quality,
        "settings": choice.settings._asdict(),
        "image_tokens": choice.tokens,
        "gpus": [gpu.index for gpu in choice.gpus],
        "total_bytes": choice.footprint.total_bytes,
        "spare_bytes": choice.spare_bytes,
        "peak_phase": choice.footprint.peak_phase,
        "placement": dict(placement(choice)),
        "components": [
            {
                "name": part.name,
                "bytes": part.nbytes,
                "measured_bytes": measured(choice, part.name) if measured else None,
                "phase": part.phase,
                "basis": part.basis,
                "why": part.why,
            }
            for part in choice.footprint.components
        ],
        "roofline": {name: getattr(choice.speed, name) for name in ROOFLINE},
    }


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The content of a saved plan: model, settings of the choice, and the options that were asked for."""

    model: str
    settings: Settings
    asked: dict[str, Any]

    def over(self, load: LoadOptions) -> LoadOptions:
        """The plan's options, overridden by those of `load` that were given; the model is the file's.

        Raises:
            InputError: another model was named.
        """
        if load.model not in ("", self.model):
            raise InputError(f"the saved plan is for {self.model}, not for {load.model}; leave the model out")
        return LoadOptions(**{**self.asked, **load.said(), "model": self.model})


def read(path: Path) -> SavedPlan:
    """Read a saved plan.

    Raises:
        InputError: there is no such file, or it holds no plan with a choice; names what is wrong.
    """
    try:
        values = json_object(read_small(path, MAX_PLAN_BYTES)) or {}
        choice = values["choice"]
        model, given = choice["model"], choice["settings"]
        asked = LoadOptions(**values["load"]).said()
    except OSError as error:
        raise InputError(f"--plan {path} can't be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RequestError):
        raise InputError(
            f"--plan {path} holds no plan with a choice; make one: snugvl plan MODEL --save {path}"
        ) from None
    return SavedPlan(str(model), _settings(path, given), asked)


def _settings(path: Path, given: Any) -> Settings:
    """Every setting of the right type; one that a later version added has its default."""
    hints = get_type_hints(Settings)
    if not isinstance(given, dict) or (unknown := sorted(given.keys() - hints.keys())):
        what = f"settings {', '.join(unknown)}" if isinstance(given, dict) else "no settings"
        raise InputError(f"--plan {path} has {what}, which this version doesn't know; save it again")
    for name, value in given.items():
        try:
            right = not isinstance(read_value(hints[name], value, name), int) or value >= 0
        except ValueError:
            right = False
        if not right:
            raise InputError(f"--plan {path}: setting {name} can't be {value!r}; save it again")
    return Settings(**{"engine": "native", **given})
