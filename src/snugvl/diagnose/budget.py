"""The reconstructed budget of a run: what there was, what it went to, and what the log leaves open."""

# ruff: noqa: E501 - whole sentences

from snugvl.diagnose.facts import MIB, Facts, Value, size, sized
from snugvl.diagnose.result import Budget, Part

ROUNDING = 32 * MIB  # vLLM prints two decimals of a GiB; a few of them rounded


def reconstruct(facts: Facts) -> Budget:
    """The budget, from the engine's own lines."""
    if facts.engine in ("llama.cpp", "ollama"):
        return _llama(facts)
    if facts.engine in ("pytorch", "transformers") or (facts.run.has("oom_new", "oom_old") and not facts.kv):
        return _torch(facts)
    return _vllm(facts)


def _parts(*named: tuple[str, Value | None]) -> tuple[Part, ...]:
    return tuple(Part(name, value.nbytes, value.origin, value.line) for name, value in named if value)


def _vllm(facts: Facts) -> Budget:
    frame = _parts(
        ("total", facts.total),
        ("free before the start", facts.free),
        ("ceiling (total × utilisation)", facts.ceiling),
    )
    split = facts.non_torch and facts.activation
    uses = _parts(
        ("weights", facts.weights),
        ("CUDA context and libraries", facts.non_torch),
        ("peak of the profiling run", facts.activation if split else None),
        ("profiling run, encoder, context, libraries", None if split else facts.overhead),
        ("KV cache", facts.kv),
    )
    needed = facts.kv_needed.nbytes if facts.kv_needed else None
    if facts.ceiling and facts.weights and facts.kv:
        spent = sum(part.nbytes for part in uses)
        rest = facts.ceiling.nbytes - spent
        note = "" if abs(rest) <= ROUNDING else "The parts do not add up to the ceiling; lines are missing."
        if facts.graphs and facts.graphs.nbytes > 0:
            note += " CUDA graphs come on top of the ceiling, or are estimated inside it since vLLM 0.21."
        if facts.ceiling.origin == "inferred":
            note += " The log does not name the utilisation; the version's default is assumed."
        uses += _parts(("CUDA graphs", facts.graphs))
        return Budget(frame, uses, rest, needed, note.strip())
    missing = [
        name
        for name, value in (("total", facts.total), ("weights", facts.weights), ("KV cache", facts.kv))
        if value is None
    ]
    uses += _parts(("CUDA graphs", facts.graphs))
    if not (frame or uses):
        return Budget(needed_bytes=None)
    return Budget(frame, uses, None, needed, f"The log does not say: {', '.join(missing)}.")


def _torch(facts: Facts) -> Budget:
    """From PyTorch's message: total = free + this process + others; this process = its parts."""
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
        uses = _parts(
            ("tensors of this process", allocated),
            ("reserved by PyTorch but unused", unallocated),
            ("CUDA context and libraries", outside),
            ("other processes", others),
        )
        rest = None
        if facts.total and outside and others:
            rest = facts.total.nbytes - sum(part.nbytes for part in uses)
        note = "" if rest is not None else "The message does not say what this process holds in all."
        frame = _parts(("total", facts.total), ("free at the failure", free))
        return Budget(frame, uses, rest, wanted.nbytes if wanted else None, note)
    if hit := run.last("oom_old"):
        allocated, free = sized(hit, 3), sized(hit, 5)
        reserved = sized(hit, 7)
        rest = None
        if facts.total and free and reserved:
            rest = facts.total.nbytes - free.nbytes - reserved.nbytes
        unused = Value(reserved.nbytes - allocated.nbytes, "computed") if reserved and allocated else None
        return Budget(
            _parts(("total", facts.total), ("free at the failure", free)),
            _parts(("tensors of this process", allocated), ("reserved by PyTorch but unused", unused)),
            rest,
            wanted.nbytes if (oom := run.last("oom")) and (wanted := sized(oom, 0)) else None,
            "What remains is the CUDA context and other processes; this old message does not tell them apart.",
        )
    return Budget(frame=_parts(("total", facts.total), ("free", facts.free)))


def _llama(facts: Facts) -> Budget:
    run = facts.run
    uses: list[tuple[str, Value | None]] = []
    for key, name in (("gguf_weights", "weights"), ("gguf_kv", "KV cache"), ("gguf_compute", "compute buffer"),
                      ("clip_compute", "vision compute buffer")):  # fmt: skip
        for hit in run.all(key):
            if key == "clip_compute" and not hit.groups[0].startswith(("CUDA", "Vulkan", "ROCm")):
                continue
            uses.append((f"{name} ({hit.groups[0]})", size(hit.groups[1], "MiB", hit)))
    if clip := run.last("clip"):
        uses.append(("vision weights", size(clip.groups[0], "MiB", clip)))
    wanted = size(refused.groups[0], "MiB", refused) if (refused := run.last("cuda_malloc")) else None
    parts = _parts(*uses)
    rest = facts.free.nbytes - sum(part.nbytes for part in parts) if facts.free and parts else None
    note = "The CUDA context and other processes are not in these lines." if parts else ""
    frame = _parts(("total", facts.total), ("free before the start", facts.free))
    return Budget(frame, parts, rest, wanted.nbytes if wanted else None, note)
