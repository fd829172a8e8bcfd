"""Causes that are a matter of memory on the GPU, for vLLM and PyTorch, from the numbers of the run."""

# ruff: noqa: E501 - one pattern or one whole sentence a line reads better than a wrapped one

from typing import Final

from snugvl.core.sizes import GIB, MIB
from snugvl.diagnose.facts import RunFacts, size, sized
from snugvl.diagnose.result import Cause, Confidence, Kind
from snugvl.diagnose.scan import LoggedRun
from snugvl.hardware.calibration import estimate_of

SMALL_TOKENS: Final = 1024  # image tokens below which grounding suffers: no plan should go lower by itself
NOTICEABLE: Final = 300 * MIB  # held by others
_FRAMES: Final = ("frame_kv", "frame_tower", "frame_profile")


def gib(nbytes: int) -> str:
    """GiB with two decimals."""
    return f"{nbytes / GIB:.2f} GiB"


def cause(facts: RunFacts, kind: Kind, confidence: Confidence, text: str, *keys: str) -> Cause:
    """A cause with the lines of those kinds as evidence."""
    return Cause(kind, confidence, text, facts.run.evidence(*keys))


def profile_saving(facts: RunFacts) -> int | None:
    """About how many bytes an encoder profile of SMALL_TOKENS would save, or None."""
    if not facts.known or not facts.known.profile_bytes:
        return None
    tokens = facts.image_tokens or (0 if facts.explicit_pixels else facts.known.max_image_tokens)
    return max(tokens - SMALL_TOKENS, 0) * facts.known.profile_bytes


def no_room_for_cache(facts: RunFacts) -> list[Cause]:
    """Causes where vLLM found too little memory for the KV cache: vision profile, weights, utilisation, context."""
    run = facts.run
    keys = ("no_blocks", "kv_short", "kv_short_tokens", "autofit_failed")
    if not run.has(*keys):
        return []
    found: list[Cause] = []
    available = facts.kv.nbytes if facts.kv else None
    saving = profile_saving(facts) or 0
    if (available is not None and available > 0) or run.has("kv_short_tokens"):
        found.append(_context(facts))
    if saving >= GIB // 2 and (available is None or available < 2 * GIB):
        tokens = facts.image_tokens or (facts.known.max_image_tokens if facts.known else 0)
        said = "vLLM profiled" if facts.image_tokens else "by its checkpoint's default vLLM profiles"
        text = f"{said} the encoder with {tokens:,} image tokens; with {SMALL_TOKENS:,} about {gib(saving)} come back"
        decisive = available is not None and available <= 0 < available + saving
        confidence: Confidence = "certain" if decisive and facts.image_tokens else "likely"
        found.insert(0 if (available or 0) <= 0 else len(found),
                     cause(facts, "vision_profile", confidence, f"{text}.", "encoder", "kv", *keys))  # fmt: skip
    if (available is None or available <= 0) and (weights := _weights_dominate(facts, saving)):
        found.append(weights)
    if low := _utilisation_low(facts):
        found.append(low)
    if not found and available is not None and (split := _ceiling_spent(facts)):
        found.append(cause(facts, "context", "likely", split, "weights", "kv", *keys))
    if not found:
        text = "No memory was left for the KV cache, and the log has too few numbers to say what took it."
        found.append(cause(facts, "out_of_memory", "possible", text, "kv", *keys))
    return found


def _context(facts: RunFacts) -> Cause:
    run = facts.run
    if hit := run.last("kv_short_tokens"):
        text = f"{hit.groups[0]} tokens were asked for; the KV cache holds {hit.groups[1]}."
    elif facts.kv and facts.kv_needed and facts.kv_needed.nbytes > facts.kv.nbytes:
        text = f"{facts.context:,} tokens need {gib(facts.kv_needed.nbytes)} of KV cache; there are {gib(facts.kv.nbytes)}."
    else:
        text = "One full-length request needs more KV cache than there is."
    return cause(facts, "context", "certain", text, "kv", "kv_short", "kv_short_tokens")


def _weights_dominate(facts: RunFacts, saving: int) -> Cause | None:
    if not facts.weights or not facts.ceiling or facts.ceiling.nbytes <= 0:
        return None
    if _utilisation_low(facts) and facts.total and facts.weights.nbytes < 0.7 * facts.total.nbytes:
        return None  # the card has room for them; what is allowed of it has not
    share = facts.weights.nbytes / facts.ceiling.nbytes
    hopeless = facts.kv is not None and facts.kv.nbytes + saving <= 0
    enough = 0.9 if saving else 0.7
    if share < enough and not (hopeless and saving):
        return None
    text = f"The weights take {gib(facts.weights.nbytes)} of a ceiling of {gib(facts.ceiling.nbytes)}."
    # Above what is allowed is not above what there is.
    sure = share > 1 and (facts.total is None or facts.weights.nbytes > 0.9 * facts.total.nbytes)
    return cause(facts, "weights", "certain" if sure else "likely", text, "weights", "v0_parts", "v0_ceiling")


def _ceiling_spent(facts: RunFacts) -> str:
    """The sentence on what took the memory that was allowed, or ""."""
    if not (facts.ceiling and facts.weights and facts.overhead and facts.kv):
        return ""
    return (
        f"Of {gib(facts.ceiling.nbytes)} that it may use, vLLM counts {gib(facts.weights.nbytes)} for weights and "
        f"{gib(facts.overhead.nbytes)} for activations and libraries, {gib(-facts.kv.nbytes)} too much with no KV cache at all."
    )


def _utilisation_low(facts: RunFacts) -> Cause | None:
    if facts.utilisation is None or not facts.utilisation_given or facts.utilisation > 0.85:
        return None
    if facts.card is not None:
        return None  # the share was computed: what it leaves is the margin and the CUDA context
    if facts.free and facts.total and facts.free.nbytes < facts.total.nbytes * (facts.utilisation + 0.05):
        return None  # nothing more is free
    text = f"Only {facts.utilisation:.2f} of the card is allowed; if nothing else holds the rest, raising it helps."
    return cause(
        facts, "utilisation_low", "likely", text, "v0_ceiling", "args", "namespace", "command", "summary"
    )


def over_free(facts: RunFacts) -> list[Cause]:
    """The cause that less is free than the utilisation's share of the card's total."""
    if not (hit := facts.run.last("over_free")) or not (facts.free and facts.total and facts.ceiling):
        return []
    gap = facts.ceiling.nbytes - facts.free.nbytes
    text = (
        f"It is a fraction of the whole card: {hit.groups[2]} × {gib(facts.total.nbytes)} = "
        f"{gib(facts.ceiling.nbytes)}, but {gib(facts.free.nbytes)} are free, {gib(gap)} too few."
    )
    found = [cause(facts, "utilisation_over_free", "certain", text, "over_free")]
    held, own = facts.total.nbytes - facts.free.nbytes, estimate_of(None)
    if held - own >= NOTICEABLE:
        where = "; under WSL2 the rest is the Windows desktop and its programs" if facts.wsl2 else ""
        text = f"{gib(held)} are taken when vLLM looks, of which its own CUDA context is about {gib(own)}{where}."
        sure: Confidence = "certain" if held > 3 * own else "likely"
        found.append(cause(facts, "tenants", sure, text, "over_free", "wsl"))
    return found


def disturbed(facts: RunFacts) -> list[Cause]:
    """The cause that free memory grew during profiling."""
    hit = facts.run.last("disturbed")
    if not hit:
        return []
    unit = "GiB" if hit.groups[1] or float_or_zero(hit.groups[0]) < 10_000 else "bytes"
    before, after = size(hit.groups[0], unit), size(hit.groups[2], unit)
    grown = f" by {gib(after.nbytes - before.nbytes)}" if before and after else ""
    text = f"Free memory grew{grown} while vLLM measured itself, so that its measurement is worthless."
    return [cause(facts, "profiling_disturbed", "certain", text, "disturbed")]


def float_or_zero(text: str) -> float:
    """A number of a log; 0 for other values."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def out_of_memory(facts: RunFacts) -> list[Cause]:
    """Causes where PyTorch's allocator failed, by when it did and by its message."""
    run = facts.run
    if facts.engine in ("llama.cpp", "ollama") or not run.has(
        "oom", "oom_bare", "oom_mps", "load_failed", "sampler"
    ):
        return []
    found: list[Cause] = [*_spill(facts)]
    frames = _frames(run)
    if _while_serving(run):
        where = (
            "in the vision encoder, an image" if "frame_tower" in frames else "a step, an image or an adapter"
        )
        text = f"It had started and was answering: {where} needed more than the start had tried."
        found.append(
            cause(facts, "serving_memory", "certain", text, "served", "stepping", "oom_parts", "oom")
        )
    elif "frame_kv" in frames:
        found.append(_cache_refused(facts))
    elif run.has("sampler"):
        text = "Everything else fitted; the trial with as many sequences as allowed did not."
        found.append(cause(facts, "batch", "certain", text, "sampler", "oom"))
    elif run.has("capturing") or run.has("oom_pools"):
        text = "Weights and KV cache were in place; the graphs for many batch sizes no longer fitted."
        found.append(cause(facts, "cuda_graphs", "likely", text, "capturing", "oom_parts", "oom"))
    elif run.has("load_failed") or _while_loading(facts):
        found += _weights_refused(facts)
    else:
        found += _in_the_encoder(facts, frames)
    if not any(cause.kind == "tenants" for cause in found):
        found += _others(facts)
    if fragmented := _fragmented(facts):
        found.append(fragmented)
    if not any(cause.confidence != "possible" for cause in found):
        keys = ("oom", "oom_mps", "oom_new", "oom_old", "oom_bare")
        found.append(cause(facts, "out_of_memory", "certain", _by_numbers(facts), *keys))
    return found


def _frames(run: LoggedRun) -> set[str]:
    """The known frames of the traceback that ends in the last out-of-memory error."""
    end = max((hit.line for key in ("oom", "oom_bare", "oom_mps") if (hit := run.last(key))), default=0)
    begin = max((hit.line for hit in run.all("traceback") if hit.line <= end), default=0)
    return {key for key in _FRAMES if any(begin <= hit.line <= end for hit in run.all(key))}


def _cache_refused(facts: RunFacts) -> Cause:
    """The cause that the KV cache did not fit although vLLM had measured that it does."""
    text = "The memory ran out while the KV cache was allocated: vLLM had measured before that it fits, so others hold or have taken what it counted on."
    if held := _held(facts):
        return cause(facts, "tenants", "likely", f"{text} {held}", "frame_kv", "oom_others", "oom_new", "oom")
    return cause(facts, "out_of_memory", "certain", text, "frame_kv", "oom", "oom_bare")


def _in_the_encoder(facts: RunFacts, frames: set[str]) -> list[Cause]:
    """Causes of a failure in vLLM's profiling run, mostly the vision encoder's; elsewhere in encoding an image."""
    run = facts.run
    tower = "frame_tower" in frames
    saving = profile_saving(facts) or 0
    if facts.engine != "vllm":
        if not tower or "frame_profile" in frames:
            return []
        text = "The memory ran out inside the vision encoder, whose need grows with the image's size."
        return [cause(facts, "image_buffer", "likely", text, "frame_tower", "oom", "oom_mps", "oom_bare")]
    profiling = "frame_profile" in frames or (run.has("weights") and not run.has("kv"))
    if not profiling or not (tower or saving > GIB // 2):
        return []
    where = (
        "in the vision encoder, which vLLM profiles with the largest image"
        if tower
        else "in the profiling run after the weights"
    )
    text = f"It ran out {where}"
    text += f"; a profile of {SMALL_TOKENS:,} tokens would take about {gib(saving)} less." if saving else "."
    found = [
        cause(facts, "vision_profile", "likely", text, "frame_tower", "encoder", "weights", "oom", "oom_bare")
    ]
    return found + ([weights] if (weights := _weights_dominate(facts, saving)) else [])


def _by_numbers(facts: RunFacts) -> str:
    """The sentence with the message's own figures of the memory."""
    run = facts.run
    if mps := run.last("oom_mps"):
        own, other, most, wanted = (sized(mps, at) for at in (0, 2, 4, 6))
        if own and other and most and wanted:
            return (
                f"PyTorch's tensors take {gib(own.nbytes)} and Metal counts {gib(other.nbytes)} of other allocations, of "
                f"{gib(most.nbytes)} that macOS allows; {gib(wanted.nbytes)} more were asked for."
            )
    hit = run.last("oom_new") or run.last("oom_old")
    total, wanted = sized(hit, 1) if hit else None, sized(oom, 0) if (oom := run.last("oom")) else None
    if not total or not wanted:
        return "The message alone does not say what took the memory."
    if wanted.nbytes > total.nbytes:
        return f"{gib(wanted.nbytes)} were asked for in one piece; the whole GPU has {gib(total.nbytes)}."
    new = run.last("oom_new")
    free = sized(new, 3) if new else None
    if free and free.nbytes > wanted.nbytes * 3 // 2:
        return f"{gib(wanted.nbytes)} were refused although {gib(free.nbytes)} are called free: not in one piece, or not for this process."
    if (ours := _own_tensors(facts)) >= total.nbytes * 3 // 4:
        enough = free is not None and free.nbytes >= wanted.nbytes
        why = (
            " What is called free was as much as was asked for, but not to be had in one piece."
            if enough
            else ""
        )
        return f"This process's own tensors take {gib(ours)} of {gib(total.nbytes)}.{why}"
    return f"{gib(wanted.nbytes)} were asked for on a GPU of {gib(total.nbytes)}; the message does not say what is in its way."


def _own_tensors(facts: RunFacts) -> int:
    """Bytes that PyTorch's allocator had given to tensors, as its message says; 0 where it doesn't."""
    hit = facts.run.last("oom_parts")
    value = sized(hit, 0) if hit else (sized(old, 3) if (old := facts.run.last("oom_old")) else None)
    return value.nbytes if value else 0


def _while_serving(run: LoggedRun) -> bool:
    """Whether it failed in a step of requests, or after an answer."""
    answered, failed = run.first("served"), run.last("oom")
    return run.has("stepping") or bool(answered and failed and answered.line < failed.line)


def _weights_refused(facts: RunFacts) -> list[Cause]:
    """Causes of a failure while loading: weights larger than the GPU, else perhaps memory that others hold."""
    expected = facts.known.weights_bytes if facts.known else None
    text = "The memory ran out while the weights were loaded"
    text += f"; {facts.known.repo} needs {gib(expected)} for them." if facts.known and expected else "."
    keys = ("loading", "from_pretrained", "load_failed", "oom", "oom_bare")
    total = facts.total.nbytes if facts.total else 0
    if expected and total and expected > 0.95 * total:
        return [cause(facts, "weights", "certain", text, *keys)]
    if held := _held(facts):
        return [cause(facts, "tenants", "likely", f"{text} {held}", *keys, "oom_others")]
    if expected and total and expected < 0.8 * total:
        text += f" The GPU has {gib(total)}: what else lay in it, the message does not say."
        return [cause(facts, "out_of_memory", "certain", text, *keys)]
    return [cause(facts, "weights", "likely", text, *keys)]


def _while_loading(facts: RunFacts) -> bool:
    """Whether it failed before the weights were in: in vLLM by the lines' order, else by their size."""
    run = facts.run
    if run.has("loading"):
        return not run.has("weights", "v0_parts")
    expected = facts.known.weights_bytes if facts.known else None
    return bool(expected and facts.total and expected > facts.total.nbytes)


def _others(facts: RunFacts) -> list[Cause]:
    if said := _held(facts):
        return [cause(facts, "tenants", "likely", said, "oom_others", "oom_new", "oom_process")]
    if old := facts.run.last("oom_old"):
        total, free, reserved = sized(old, 1), sized(old, 5), sized(old, 7)
        held = total.nbytes - free.nbytes - reserved.nbytes if total and free and reserved else 0
        if held < GIB:  # our own CUDA context is in it
            return []
        text = f"{gib(held)} are neither free nor PyTorch's; a CUDA context takes half a GiB at most."
        return [cause(facts, "tenants", "possible", text, "oom_old")]
    return []


def _held(facts: RunFacts) -> str:
    """The sentence on memory that others hold, or "" where that is next to nothing."""
    held = facts.held
    if held is None or held.nbytes < NOTICEABLE:
        return ""
    of = f" of {gib(facts.total.nbytes)}" if facts.total else ""
    if not held.processes:
        return f"{gib(held.nbytes)}{of} belong neither to this process nor to the free memory."
    text = ", ".join(f"process {pid} {gib(nbytes)}" for pid, nbytes in held.processes)
    together = f", together {gib(held.nbytes)}{of}" if len(held.processes) > 1 else ""
    return f"Other processes hold memory: {text}{together}."


def _fragmented(facts: RunFacts) -> Cause | None:
    run = facts.run
    wanted = sized(hit, 0) if (hit := run.last("oom")) else None
    unused = None
    if parts := run.last("oom_parts"):
        unused = sized(parts, 4)
    elif old := run.last("oom_old"):
        allocated, reserved = sized(old, 3), sized(old, 7)
        if allocated and reserved:
            unused = size(str(reserved.nbytes - allocated.nbytes), "bytes")
    if not wanted or not unused or unused.nbytes < max(wanted.nbytes, 200 * MIB):
        return None
    text = f"{gib(wanted.nbytes)} were asked for while {gib(unused.nbytes)} lay reserved and unused."
    # On a card that is full of this process's own tensors the pieces between them are not what is missing.
    full = facts.total is not None and _own_tensors(facts) >= facts.total.nbytes * 3 // 4
    little = full and facts.total is not None and unused.nbytes < facts.total.nbytes // 16
    return cause(
        facts, "fragmentation", "possible" if little else "likely", text, "oom", "oom_parts", "oom_old"
    )


def _spill(facts: RunFacts) -> list[Cause]:
    """The cause that more is in use than the card has: the rest is system memory (silent under Windows, WSL2)."""
    run = facts.run
    if not facts.total:
        return []
    for key, group in (("oom_process", 0), ("oom_parts", 0), ("oom_old", 3)):
        if (hit := run.last(key)) and (used := sized(hit, group)) and used.nbytes > facts.total.nbytes + MIB:
            text = f"{gib(used.nbytes)} were in use on a card of {gib(facts.total.nbytes)}; the rest lay in system memory."
            return [cause(facts, "spill", "certain", text, key)]
    return []


def tied_head(facts: RunFacts) -> list[Cause]:
    """The cause that an FP8 checkpoint stores a head that the model ties: loaded, it takes its bytes again."""
    known, weights = facts.known, facts.weights
    expected = known.weights_bytes if known else None
    if not known or not weights or not expected or not known.untied_bytes:
        return []
    extra = weights.nbytes - expected
    # vLLM itself adds about 0.3 GiB (position table, input buffers).
    if not known.untied_bytes - 100 * MIB <= extra <= known.untied_bytes + 600 * MIB or extra < 500 * MIB:
        return []
    text = f"{gib(weights.nbytes)} were loaded, {gib(expected)} are needed; the stored head has {gib(known.untied_bytes)}."
    return [cause(facts, "tied_head", "possible", text, "weights")]
