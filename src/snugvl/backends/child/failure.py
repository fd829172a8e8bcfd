"""A start that failed: its cause from the log, a way out in a sentence, and the choice to retry with."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from snugvl.backends.child import flags
from snugvl.backends.child.settings import ChildChoice
from snugvl.backends.supervisor import Ending
from snugvl.diagnose.explain import explain
from snugvl.diagnose.result import Cause, Diagnosis
from snugvl.errors import DoesNotFit, EngineError, SnugvlError

_MEMORY: Final = (
    "vision_profile", "context", "utilisation_over_free", "utilisation_low", "tenants", "cuda_graphs",
    "batch", "weights", "fragmentation", "spill", "residency", "out_of_memory", "host_memory", "host_killed",
    "image_buffer", "compute_buffer", "vision_weights",
)  # fmt: skip
_FULL: Final = ("weights", "context")
# Lines that say where it stopped, and nothing of why.
_NO_CAUSE: Final = ("tied_head", "exception")
_LESS: Final = (
    "A shorter --context, smaller pictures (--max-pixels) or a smaller model needs less: "
    "`snugvl plan` says what fits."
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A start that failed.

    Attributes:
        error: cause and way out.
        cause: the cause, as a clause.
        port_taken: whether another port is all it needs.
        retry: the choice that could work, or None.
    """

    error: SnugvlError
    cause: str
    port_taken: bool = False
    retry: ChildChoice | None = None


def understand(ending: Ending, choice: ChildChoice, name: str, start: Sequence[str]) -> Failure:
    """Find why a start failed and what can be done. `name`: the engine's; `start`: its command without
    flags."""
    if ending.error is not None:
        return Failure(ending.error, str(ending.error))
    command = shlex.join([*start, *choice.arguments])
    diagnosis = explain("\n".join([command, *ending.lines]), choice.card)
    causes = [cause for cause in diagnosis.causes if cause.kind not in _NO_CAUSE]
    if not causes:
        return Failure(
            EngineError(f"{name} did not start: {ending.reason}; its own command says more: {command}"),
            ending.reason,
        )
    cause = causes[0]
    if cause.kind == "port":
        taken = EngineError(f"{name} did not start: its port was taken twice in a row; start again")
        return Failure(taken, cause.title, port_taken=True)
    error: SnugvlError
    text = f"{cause.title}: {cause.explanation}"
    retry = _retry(diagnosis, causes, choice)
    way_out = _way_out(diagnosis)
    if choice.replan is not None and cause.kind in _FULL and retry is None:
        way_out = _LESS  # the plan has given it all that there is: no flag gains anything
    message = f"{name} did not start: {text} {way_out}".rstrip()
    error = DoesNotFit(message) if cause.kind in _MEMORY else EngineError(message)
    return Failure(error, text.rstrip("."), retry=retry)


def _way_out(diagnosis: Diagnosis) -> str:
    changes = [
        f"remove {change.flag}" if change.new is None else f"{change.flag} {change.new}".rstrip()
        for change in diagnosis.changes
    ]
    if changes:
        return f"Change: {', '.join(changes)}."
    return diagnosis.notes[0] if diagnosis.notes else ""


def _retry(diagnosis: Diagnosis, causes: list[Cause], choice: ChildChoice) -> ChildChoice | None:
    if choice.replan is not None:
        changed: ChildChoice | None = choice.replan(diagnosis, choice)
    else:
        changed = replace(
            choice,
            arguments=flags.apply(choice.arguments, diagnosis.changes),
            environment=choice.environment + flags.variables(diagnosis.changes),
        )
    if changed is None or (changed.arguments, changed.environment) == (choice.arguments, choice.environment):
        return None
    return changed
