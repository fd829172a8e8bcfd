"""A plan as JSON, schema version 1 (documented in docs/plan.md). Sizes are bytes, speeds per second."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from snugvl.core.reason import Reason
from snugvl.hardware.machine import Machine
from snugvl.planner.commands import load_options, next_command, plain_command
from snugvl.planner.engines.transformers.placement import placement
from snugvl.planner.footprint.component import Component
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.report.sections import Measured, headline
from snugvl.planner.shortfall import why_engine
from snugvl.planner.wishes import Wishes

SCHEMA_VERSION = 1
BUDGET = ("total_bytes", "held_bytes", "margin_bytes", "usable_bytes")
ROOFLINE = ("decode_tokens_per_s", "first_token_s", "crossing_bytes")
# Names in the JSON of what is said of a reason, and its attributes.
REJECTION = {
    "what": "text", "short_bytes": "short_bytes", "blame": "blame", "blame_bytes": "blame_bytes",
    "remedy": "remedy", "model": "model",
}  # fmt: skip
VERDICT = {"engine": "engine", "reason": "text"}
REFUSAL = {"model": "model", **VERDICT}


def document(plan: Plan, machine: Machine, measured: Measured | None = None) -> dict[str, Any]:
    """The plan as JSON values."""
    budget = plan.budget
    return {
        "schema": SCHEMA_VERSION,
        "headline": headline(plan, machine),
        "fits": plan.choice is not None,
        "wishes": _wishes(plan.wishes),
        "machine": {"os": machine.os, "gpus": len(machine.gpus), "source": machine.source},
        "budget": {
            "device": budget.name,
            **{name: getattr(budget, name) for name in BUDGET},
        },
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
        "streamed": _choice(plan.streamed, measured) if plan.streamed else None,
        "refusals": [_named(each, REFUSAL) for each in plan.refusals],
    }


def _wishes(wishes: Wishes) -> dict[str, Any]:
    """Wishes by name, each option beside them under its own."""
    values = asdict(wishes)
    del values["also"]
    return values | dict(wishes.also)


def _named(reason: Reason, names: Mapping[str, str]) -> dict[str, Any]:
    return {name: getattr(reason, attribute) for name, attribute in names.items()}


def _choice(choice: Choice, measured: Measured | None) -> dict[str, Any]:
    return {
        "model": choice.option.model.name,
        "stored_format": choice.option.stored_quality,
        "settings": asdict(choice.settings),
        "image_tokens": choice.tokens,
        "gpus": [gpu.index for gpu in choice.gpus],
        "total_bytes": choice.footprint.total_bytes,
        "spare_bytes": choice.spare_bytes,
        "peak_phase": choice.footprint.peak_phase,
        "placement": dict(placement(choice)),
        "components": [_component(part, choice, measured) for part in choice.footprint.components],
        "roofline": {name: getattr(choice.speed, name) for name in ROOFLINE},
    }


def _component(part: Component, choice: Choice, measured: Measured | None) -> dict[str, Any]:
    return {
        "name": part.name,
        "bytes": part.nbytes,
        "measured_bytes": measured(choice, part.name) if measured else None,
        "phase": part.phase,
        "basis": part.basis,
        "why": part.why,
    }
