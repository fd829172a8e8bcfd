"""`explain`: a log in, a diagnosis out, with the run's budget put together from its own lines.

It never raises, whatever a log holds.
"""

import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Final

from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import MIB
from snugvl.diagnose import memory, other, remedy
from snugvl.diagnose.facts import Card, RunFacts, Value, gather, size, sized
from snugvl.diagnose.result import Cause, Diagnosis, MemoryPart, RunBudget
from snugvl.diagnose.scan import ByteSource, LoggedRun, blocks, scan
from snugvl.errors import InputError

WHOLE_CONTEXT: Final = "KV cache that the whole context needs"
GRAPHS_INSIDE_SINCE: Final = 21  # minor version of vLLM
ROUNDING: Final = 32 * MIB  # vLLM prints two decimals of a GiB; a few of them rounded
_RULES: Final[tuple[Callable[[RunFacts], list[Cause]], ...]] = (
    memory.over_free,
    memory.disturbed,
    memory.no_room_for_cache,
    other.llama,
    memory.out_of_memory,
    other.kernels,
    other.plain,
    other.flags,
)
BEGINNING: Final = 4096  # bytes that tell text from other files
_ORDER: Final = {"certain": 0, "likely": 1, "possible": 2}


def explain(text: str, card: Card | None = None) -> Diagnosis:
    """Diagnose the text of a log. `card`: facts of the GPU, used where the log has none."""
    return explain_stream(BytesIO(text.encode("utf-8", "replace")), card)


def explain_file(path: Path) -> Diagnosis:
    """Diagnose a file of any size, in bounded memory."""
    try:
        with path.open("rb") as file:
            if b"\0" in file.read(BEGINNING):
                raise InputError(f"{path} isn't a text file; name the log of an engine")
            file.seek(0)
            return explain_stream(file)
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}; name a log file, or - for standard input"
        ) from None


def explain_stream(source: ByteSource, card: Card | None = None) -> Diagnosis:
    """Diagnose a stream of bytes: a file, a pipe."""
    run = scan(blocks(source))
    facts = gather(run, card)
    causes = _causes(facts)
    found = remedy.changes(facts, causes)
    budget = reconstruct(facts) if run.hits else RunBudget()
    return Diagnosis(
        recognised=bool(facts.engine or causes),
        healthy=not causes and run.has(*other.UP),
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
        notes=remedy.notes(facts, causes, found) + _asides(facts, run, shown=bool(found)),
    )


def _causes(facts: RunFacts) -> tuple[Cause, ...]:
    """Every cause once, the surest first, then in the order of the rules."""
    first: dict[str, Cause] = {}
    for rule in _RULES:
        for cause in rule(facts):
            first.setdefault(cause.kind, cause)
    if not first:
        first.update({cause.kind: cause for cause in other.settings(facts)})
    if not first:
        first.update({cause.kind: cause for cause in other.last_exception(facts)})
    if first or facts.run.failures:
        for cause in memory.tied_head(facts):
            first.setdefault(cause.kind, cause)
    return tuple(sorted(first.values(), key=lambda cause: _ORDER[cause.confidence]))


def _asides(facts: RunFacts, run: LoggedRun, *, shown: bool) -> tuple[str, ...]:
    """Notes on all else that was understood. `shown`: whether the changed command is shown."""
    said = []
    if run.starts > 1:
        said.append(f"The log holds {run.starts} starts; only the last one is diagnosed.")
    if run.has("dequantised"):
        said.append("This GPU has no FP8 units: vLLM reads the weights through Marlin, which works.")
    if run.has("fp8_dequantised"):
        said.append("transformers turned the FP8 weights into bf16: they take twice the memory of the file.")
    if run.has("pin_fallback"):
        said.append(
            "vLLM keeps its tables in device memory instead of pinned memory (WSL2); that is not an error."
        )
    if facts.command and facts.command.rebuilt and shown:
        said.append("The command is put together from vLLM's list of arguments; defaults are left out.")
    return tuple(said)


def reconstruct(facts: RunFacts) -> RunBudget:
    """The run's memory budget, from the engine's own lines."""
    if facts.engine in ("llama.cpp", "ollama"):
        return _llama(facts)
    if facts.engine in ("pytorch", "transformers") or (facts.run.has("oom_new", "oom_old") and not facts.kv):
        return _torch(facts)
    return _vllm(facts)


def _parts(*named: tuple[str, Value | None]) -> tuple[MemoryPart, ...]:
    return tuple(MemoryPart(name, value.nbytes, value.origin, value.line) for name, value in named if value)


def _vllm(facts: RunFacts) -> RunBudget:
    run = facts.run
    frame = _parts(
        ("total", facts.total),
        ("free before the start", facts.free),
        ("ceiling (total × utilisation)", facts.ceiling),
    )
    split = facts.non_torch and facts.activation
    uses = _parts(
        (Kind.WEIGHTS, facts.weights),
        (Kind.CONTEXT, facts.non_torch),
        ("peak of the profiling run", facts.activation if split else None),
        ("profiling run, encoder, context, libraries", None if split else facts.overhead),
        (Kind.CACHE, facts.kv),
    )
    needed = facts.kv_needed.nbytes if facts.kv_needed else None
    if facts.ceiling and facts.weights and facts.kv:
        spent = sum(part.nbytes for part in uses)
        rest = facts.ceiling.nbytes - spent
        note = "" if abs(rest) <= ROUNDING else "The parts do not add up to the ceiling; lines are missing."
        if facts.graphs and facts.graphs.nbytes > 0:
            note += f" {_where_graphs_are(run)}"
        if facts.ceiling.origin == "inferred":
            note += " The log does not name the utilisation; the version's default is assumed."
        uses += _parts((Kind.GRAPHS, facts.graphs))
        return RunBudget(frame, uses, rest, needed, note.strip(), WHOLE_CONTEXT)
    missing = [
        name
        for name, value in (("total", facts.total), (Kind.WEIGHTS, facts.weights), (Kind.CACHE, facts.kv))
        if value is None
    ]
    uses += _parts((Kind.GRAPHS, facts.graphs))
    if not (frame or uses):
        return RunBudget(needed_bytes=None)
    note = f"The log does not say: {', '.join(missing)}."
    return RunBudget(frame, uses, None, needed, note, WHOLE_CONTEXT)


def _where_graphs_are(run: LoggedRun) -> str:
    minor = re.match(r"0\.(\d{1,4})", run.version or "")
    if minor is None:
        return "CUDA graphs come on top of the ceiling; since vLLM 0.21 they are estimated inside it."
    if int(minor[1]) < GRAPHS_INSIDE_SINCE:
        return "CUDA graphs come on top of the ceiling."
    return "CUDA graphs are part of what was set aside in the profiling run, which estimates them beforehand."


def _torch(facts: RunFacts) -> RunBudget:
    """The budget from PyTorch's message: total = free + this process + others; this process = its parts."""
    run = facts.run
    if hit := run.last("oom_new"):
        free = sized(hit, 3)
        mine = sized(process, 0) if (process := run.last("oom_process")) else None
        parts = run.last("oom_parts")
        allocated = sized(parts, 0) if parts else None
        unallocated = sized(parts, 4) if parts else None
        wanted = sized(oom, 0) if (oom := run.last("oom")) else None
        outside = None
        if mine and allocated and unallocated:
            context = mine.nbytes - allocated.nbytes - unallocated.nbytes
            outside = Value(context, "computed") if context >= 0 else None
        others = None
        if facts.total and free and mine:
            others = Value(max(facts.total.nbytes - free.nbytes - mine.nbytes, 0), "computed")
        both = None
        if facts.total and free and allocated and unallocated and not mine:
            left = facts.total.nbytes - free.nbytes - allocated.nbytes - unallocated.nbytes
            both = Value(left, "computed") if left > 0 else None
        uses = _parts(
            ("tensors of this process", allocated),
            ("reserved by PyTorch but unused", unallocated),
            (Kind.CONTEXT, outside),
            ("other processes", others),
            ("context, libraries and other processes", both),
        )
        rest = None
        if facts.total and outside and others:
            rest = facts.total.nbytes - sum(part.nbytes for part in uses)
        note = "" if rest is not None else "The message does not tell this process from others."
        frame = _parts(("total", facts.total), ("free at the failure", free))
        return RunBudget(frame, uses, rest, wanted.nbytes if wanted else None, note)
    if hit := run.last("oom_old"):
        allocated, free = sized(hit, 3), sized(hit, 5)
        reserved = sized(hit, 7)
        rest = None
        if facts.total and free and reserved:
            rest = facts.total.nbytes - free.nbytes - reserved.nbytes
        unused = Value(reserved.nbytes - allocated.nbytes, "computed") if reserved and allocated else None
        return RunBudget(
            _parts(("total", facts.total), ("free at the failure", free)),
            _parts(("tensors of this process", allocated), ("reserved by PyTorch but unused", unused)),
            rest,
            wanted.nbytes if (oom := run.last("oom")) and (wanted := sized(oom, 0)) else None,
            "What remains is the CUDA context and others' memory; this old message does not tell them apart.",
        )
    if hit := run.last("oom_mps"):
        wanted = sized(hit, 6)
        return RunBudget(
            _parts(("allowed by macOS", sized(hit, 4))),
            _parts(("tensors of this process", sized(hit, 0)), ("other allocations of Metal", sized(hit, 2))),
            needed_bytes=wanted.nbytes if wanted else None,
        )
    return RunBudget(frame=_parts(("total", facts.total), ("free", facts.free)))


def _llama(facts: RunFacts) -> RunBudget:
    run = facts.run
    uses: list[tuple[str, Value | None]] = []
    names = {"gguf_weights": str(Kind.WEIGHTS), "gguf_kv": str(Kind.CACHE), "gguf_compute": "compute buffer",
             "clip_compute": "vision compute buffer"}  # fmt: skip
    for key, name in names.items():
        for hit in run.all(key):
            if key == "clip_compute" and not hit.groups[0].startswith(("CUDA", "Vulkan", "ROCm")):
                continue
            uses.append((f"{name} ({hit.groups[0]})", size(hit.groups[1], "MiB", hit)))
    if clip := run.last("clip"):
        uses.append((Kind.VISION, size(clip.groups[0], "MiB", clip)))
    wanted = size(refused.groups[0], "MiB", refused) if (refused := run.last("cuda_malloc")) else None
    parts = _parts(*uses)
    rest = facts.free.nbytes - sum(part.nbytes for part in parts) if facts.free and parts else None
    note = "The CUDA context and other processes are not in these lines." if parts else ""
    frame = _parts(("total", facts.total), ("free before the start", facts.free))
    return RunBudget(frame, parts, rest, wanted.nbytes if wanted else None, note)
