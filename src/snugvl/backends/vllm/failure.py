"""A start that failed: its cause from the log, a way out in a sentence, and the choice to retry with."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Final

from snugvl.backends.vllm import flags
from snugvl.backends.vllm.log import Log
from snugvl.backends.vllm.settings import VllmChoice
from snugvl.checkpoint.locate import POCKET
from snugvl.diagnose.explain import explain
from snugvl.diagnose.result import Cause, Diagnosis
from snugvl.errors import DoesNotFit, EngineError, SnugvlError

_MEMORY: Final = (
    "vision_profile", "context", "utilisation_over_free", "utilisation_low", "tenants", "cuda_graphs",
    "batch", "weights", "fragmentation", "spill", "residency", "out_of_memory", "host_memory", "host_killed",
)  # fmt: skip
_FULL: Final = ("weights", "context")
# Lines that say where it stopped, and nothing of why.
_NO_CAUSE: Final = ("tied_head", "exception")
_LESS: Final = (
    "A shorter --context, smaller pictures (--max-pixels) or a smaller model needs less: "
    "`snugvl plan` says what fits."
)
MAX_QUOTED: Final = 200  # characters of a line of the log
LOADING: Final = 0.2  # of a start: its weights are there (see `log`)


@dataclass(frozen=True, slots=True)
class Ending:
    """How one life of vLLM ended.

    Attributes:
        reason: half a sentence.
        lines: of its log.
        was_ready: whether it served before.
        error: what to say where the reason is known and waiting won't help; None: the log may know.
    """

    reason: str
    lines: tuple[str, ...] = ()
    was_ready: bool = False
    error: SnugvlError | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A start that failed.

    Attributes:
        error: cause and way out.
        cause: what it was, in a clause.
        port_taken: another port is all it needs.
        retry: the choice that could work, or None.
    """

    error: SnugvlError
    cause: str
    port_taken: bool = False
    retry: VllmChoice | None = None


def understand(ending: Ending, choice: VllmChoice) -> Failure:
    """Why a start failed and what can be done."""
    if ending.error is not None:
        return Failure(ending.error, str(ending.error))
    command = shlex.join(["vllm", "serve", choice.model, *choice.arguments])
    diagnosis = explain("\n".join([command, *ending.lines]), choice.card)
    causes = [cause for cause in diagnosis.causes if cause.kind not in _NO_CAUSE]
    if not causes:
        return Failure(
            EngineError(f"vLLM did not start: {ending.reason}; its own command says more: {command}"),
            ending.reason,
        )
    cause = causes[0]
    if cause.kind == "port":
        taken = EngineError("vLLM did not start: its port was taken twice in a row; start again")
        return Failure(taken, cause.title, port_taken=True)
    error: SnugvlError
    text = f"{cause.title}: {cause.explanation}"
    retry = _retry(diagnosis, causes, choice)
    way_out = _way_out(diagnosis)
    if choice.replan is not None and cause.kind in _FULL and retry is None:
        way_out = _LESS  # the plan has given vLLM all that there is: no flag gains anything
    message = f"vLLM did not start: {text} {way_out}".rstrip()
    error = DoesNotFit(message) if cause.kind in _MEMORY else EngineError(message)
    return Failure(error, text.rstrip("."), retry=retry)


def stall_error(how: str, log: Log, choice: VllmChoice) -> EngineError:
    """A start that does nothing any more. `how`: since when, in a clause."""
    last = f'its last line: "{shorten(log.last, MAX_QUOTED)}"' if log.last else "it has written no line"
    remote = choice.model != POCKET and not Path(choice.model).is_dir()
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
    if any(flags.value(choice.arguments, size) not in (None, "1") for size in sizes):
        hint = (
            "GPUs that can't reach each other directly stop like this: try the environment variable "
            "NCCL_P2P_DISABLE=1, or one GPU"
        )
    elif remote and (log.stage is None or log.stage.progress < LOADING):
        hint = (
            "it may wait for the network, or for another program that downloads the same model: run "
            f"`snugvl pull {choice.model}` first, then start with the environment variable HF_HUB_OFFLINE=1"
        )
    else:
        hint = "look whether other programs hold the GPU (snugvl doctor), and start again"
    debug = shlex.join(["VLLM_LOGGING_LEVEL=DEBUG", "vllm", "serve", choice.model, *choice.arguments])
    return EngineError(f"vLLM hung at its start: {how}; {last}; {hint}; its own command says more: {debug}")


def _way_out(diagnosis: Diagnosis) -> str:
    changes = [
        f"remove {change.flag}" if change.new is None else f"{change.flag} {change.new}".rstrip()
        for change in diagnosis.changes
    ]
    if changes:
        return f"Change: {', '.join(changes)}."
    return diagnosis.notes[0] if diagnosis.notes else ""


def _retry(diagnosis: Diagnosis, causes: list[Cause], choice: VllmChoice) -> VllmChoice | None:
    if choice.replan is not None:
        changed = choice.replan(diagnosis, choice)
    else:
        changed = replace(
            choice,
            arguments=flags.apply(choice.arguments, diagnosis.changes),
            environment=choice.environment + flags.variables(diagnosis.changes),
        )
    if changed is None or (changed.arguments, changed.environment) == (choice.arguments, choice.environment):
        return None
    return changed
