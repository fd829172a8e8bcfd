"""`explain`: a log in, a diagnosis out. Never raises on what a log holds."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Final

from snugvl.diagnose import memory, other, remedy
from snugvl.diagnose.budget import reconstruct
from snugvl.diagnose.facts import Card, Facts, gather
from snugvl.diagnose.result import Budget, Cause, Diagnosis
from snugvl.diagnose.scan import Run, scan
from snugvl.diagnose.stream import Source, blocks
from snugvl.errors import InputError

_RULES: Final[tuple[Callable[[Facts], list[Cause]], ...]] = (
    memory.over_free,
    memory.disturbed,
    memory.no_room_for_cache,
    other.llama,
    memory.out_of_memory,
    other.kernels,
    other.plain,
    other.flags,
    other.requests,
)
_ORDER: Final = {"certain": 0, "likely": 1, "possible": 2}
_UP: Final = ("up", "serving", "listening", "kv_tokens")


def explain(text: str, card: Card | None = None) -> Diagnosis:
    """Diagnose the text of a log. `card`: what is known of the GPU where the log says nothing."""
    return explain_stream(BytesIO(text.encode("utf-8", "replace")), card)


def explain_file(path: Path) -> Diagnosis:
    """Diagnose a file of any size, in bounded memory."""
    try:
        with path.open("rb") as file:
            return explain_stream(file)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}; name a log file, or - for standard input"
        ) from None


def explain_stream(source: Source, card: Card | None = None) -> Diagnosis:
    """Diagnose a stream of bytes: a file, a pipe."""
    run = scan(blocks(source))
    facts = gather(run, card)
    causes = _causes(facts)
    found = remedy.changes(facts, causes)
    budget = reconstruct(facts) if run.hits else Budget()
    healthy = not causes and not run.failures and run.has(*_UP)
    return Diagnosis(
        recognised=bool(facts.engine or causes),
        healthy=healthy,
        engine=facts.engine,
        version=facts.version,
        model=facts.model,
        gpu=facts.gpu,
        wsl2=facts.wsl2,
        starts=run.starts,
        lines=run.lines,
        causes=causes,
        budget=budget,
        command=facts.command.changed(found) if facts.command and found else None,
        changes=found,
        advice=remedy.advice(facts, causes),
        notes=remedy.notes(facts, causes, found) + _asides(facts, run),
    )


def _causes(facts: Facts) -> tuple[Cause, ...]:
    """Every cause once: the surest first, and otherwise in the order of the rules."""
    first: dict[str, Cause] = {}
    for rule in _RULES:
        for cause in rule(facts):
            first.setdefault(cause.kind, cause)
    if not first:
        first.update({cause.kind: cause for cause in other.settings(facts)})
    if first or facts.run.failures:
        for cause in memory.tied_head(facts):
            first.setdefault(cause.kind, cause)
    return tuple(sorted(first.values(), key=lambda cause: _ORDER[cause.confidence]))


def _asides(facts: Facts, run: Run) -> tuple[str, ...]:
    said = []
    if run.starts > 1:
        said.append(f"The log holds {run.starts} starts; only the last one is diagnosed.")
    if run.has("dequantised"):
        said.append("This GPU has no FP8 units: vLLM reads the weights through Marlin, which works.")
    if run.has("fp8_dequantised"):
        said.append("transformers turned the FP8 weights into bf16: they take twice the memory of the file.")
    if run.has("pin_fallback"):
        said.append(
            "vLLM keeps its tables in device memory instead of pinned memory (WSL2); that is no error."
        )
    if facts.command and facts.command.rebuilt:
        said.append("The command is put together from vLLM's list of arguments; defaults are left out.")
    return tuple(said)
