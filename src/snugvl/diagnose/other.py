"""Causes outside of the memory budget: platform, kernels, flags, access, the host; and llama.cpp's."""

# ruff: noqa: E501 - one pattern or one whole sentence a line reads better than a wrapped one

import re
from dataclasses import replace
from typing import Final

from snugvl.core.sizes import GIB, MIB
from snugvl.diagnose.command import refused_flags, removed, removed_switches, suggestion
from snugvl.diagnose.facts import RunFacts, size
from snugvl.diagnose.memory import cause, gib
from snugvl.diagnose.result import Cause, Confidence, Kind, known
from snugvl.diagnose.scan import Hit, LoggedRun, excerpt

UP: Final = ("up", "serving", "listening", "kv_tokens")  # lines that a run prints once it is there


def plain(facts: RunFacts) -> list[Cause]:
    """Causes of lines that need no further facts, with their own numbers."""
    found = []
    for keys, kind, confidence, text in known()["causes"]:
        if not facts.run.has(*keys) or (
            keys[0].startswith("nccl") and keys[0] != "nccl_memory" and facts.run.has("nccl_memory")
        ):
            continue
        hit = max((hit for key in keys if (hit := facts.run.last(key))), key=lambda hit: hit.line)
        said = [_grouped(group) for group in hit.groups]
        named = {name: _grouped(group) for name, group in hit.named.items()}
        told = text.format(*said, **{"said": excerpt(hit.text[hit.start :]), **named})
        if kind == "checkpoint" and (file := facts.run.last("gguf_file")):
            told += f" The file is {excerpt(file.groups[0])}."
        found.append(cause(facts, kind, confidence, told, *keys))
    return found


def _grouped(number: str) -> str:
    return f"{int(number):,}" if number.isdecimal() and len(number) < 16 else number


def kernels(facts: RunFacts) -> list[Cause]:
    """Causes of missing code for this GPU: PyTorch's, or only FP8 products'; or a format it can't compute in."""
    run = facts.run
    found = []
    if run.has("kernel_image"):
        fp8 = "fp8" in (facts.model or "").lower()
        kind: Kind = "fp8_kernels" if fp8 and not run.has("sm_unsupported") else "driver"
        text = "This build has no code for this GPU" + (
            ", most likely in its FP8 products; newer releases have it." if kind == "fp8_kernels" else "."
        )
        found.append(
            cause(facts, kind, "likely" if fp8 else "certain", text, "kernel_image", "sm_unsupported")
        )
    if hit := run.last("method"):
        text = f"{hit.groups[0]} needs compute capability {_dotted(hit.groups[1])}; this GPU has {_dotted(hit.groups[2])}."
        found.append(
            cause(facts, "fp8_kernels" if "fp8" in hit.groups[0] else "dtype", "certain", text, "method")
        )
    return found


def _dotted(capability: str) -> str:
    return f"{capability[:-1]}.{capability[-1]}" if len(capability) > 1 else capability


def flags(facts: RunFacts) -> list[Cause]:
    """Causes of flags and variables that this vLLM, or every vLLM, does not know."""
    found = []
    refused = refused_flags(facts.run)[:20]
    if refused:
        said = " ".join(f"{flag}: {suggestion(flag)}" for flag in refused)
        found.append(cause(facts, "unknown_flag", "certain", said, "bad_flags", "bad_keyword"))
    gone = [name for name in removed_switches(facts.command, facts.run) if name not in refused]
    if gone:
        said = " ".join(f"{name}: {removed(name)}" for name in gone)
        keys = ("bad_env", "deprecated_flag", "env_v1", "command")
        found.append(cause(facts, "removed_switch", "certain", said, *keys))
    return found


def settings(facts: RunFacts) -> list[Cause]:
    """The cause that vLLM's check of its own settings failed, with its message, where no other rule knows why."""
    hit = facts.run.last("refused")
    if hit is None:
        return []
    said = hit.groups[0].removeprefix("Value error, ").rstrip(".")
    if "int() with base 10: 'GPU-" in said:  # or 'MIG-…', for which there are no numbers
        said += ". CUDA_VISIBLE_DEVICES has names of GPUs; this version takes their numbers alone"
    return [cause(facts, "settings", "certain", f"{said}.", "refused")]


# Lines with which llama.cpp refuses a buffer, on any maker's GPU.
_REFUSED: Final[tuple[str, ...]] = (
    "cuda_malloc", "cpu_buffer", "gallocr", "alloc_range", "buffer", "buffer_mib", "load_buffer", "vk_oom",
    "kv_failed", "compute_failed", "oom_bare",
)  # fmt: skip


def llama(facts: RunFacts) -> list[Cause]:
    """Causes where llama.cpp or Ollama ran out of memory: weights, KV cache, compute buffer, encoder, an image."""
    run = facts.run
    up = came_up(run)
    refusals = [hit.line for key in _REFUSED for hit in run.all(key) if hit.line > up]
    if not refusals or facts.engine not in ("llama.cpp", "ollama"):
        return []
    wanted = _wanted(run)
    where = " of host memory" if in_host_memory(run) else ""
    asked = f"A buffer of {gib(wanted)}{where} was refused" if wanted else "A buffer was refused"
    many = f" for a context of {facts.context:,} tokens" if facts.context and run.has("n_ctx") else ""
    sure: Confidence
    if run.has("kv_failed"):  # its buffer is allocated like that of weights, so it is asked first
        return [cause(facts, "context", "certain", f"{asked}: it is the KV cache{many}.", "n_ctx", *_REFUSED)]
    if run.has("assert_buffer") or _vision_is_last(run):
        text = f"{asked} for the weights of the vision encoder (mmproj), which are loaded after the model."
        sure = "certain" if _vision_is_last(run) else "likely"
        keys = ("clip_start", *_REFUSED, "assert_buffer")
        return [cause(facts, "vision_weights", sure, text, *keys)]
    if run.has("load_buffer", "alloc_range"):
        sure = "certain" if run.has("load_buffer") else "likely"
        text = f"{asked} while the weights were placed{'' if where else ' on the GPU'}."
        return [cause(facts, "weights", sure, text, *_REFUSED)]
    if picture := _picture(run, max(refusals)):
        text, sure = f"{asked} {picture[0]}", picture[1]
        keys = ("clip_encode", "clip_warmup", *_REFUSED, "ggml_assert", "clip_failed")
        return [cause(facts, "image_buffer", sure, text, *keys)]
    return [_of_a_step(facts, asked, many, wanted)]


def _of_a_step(facts: RunFacts, asked: str, many: str, wanted: int) -> Cause:
    """The cause of a refused buffer of a step: the compute buffer, or one that the lines do not name."""
    run = facts.run
    if facts.context and wanted > 64 * MIB and run.has("n_ctx") and not run.has("compute_failed"):
        sure: Confidence = "likely" if facts.context > 16384 or wanted > GIB else "possible"
        return cause(facts, "context", sure, f"{asked}{many}.", "n_ctx", *_REFUSED)
    if run.has("gallocr", "compute_failed"):
        text = f"{asked} for the compute buffer{many}, which grows with the batch and the context."
        sure = "certain" if run.has("compute_failed") else "likely"
        return cause(facts, "compute_buffer", sure, text, *_REFUSED)
    text = (
        f"{asked}."
        if wanted
        else "The GPU had no memory left for a buffer or a step; the lines do not say for which."
    )
    return cause(facts, "out_of_memory", "certain", text, *_REFUSED)


def came_up(run: LoggedRun) -> int:
    """Number of the last line that says that the engine is up, or goes on without a refused buffer; 0 for none."""
    return max((hit.line for key in (*UP, "retried") if (hit := run.last(key))), default=0)


def in_host_memory(run: LoggedRun) -> bool:
    """Whether llama.cpp was refused a buffer in host memory and none on a GPU."""
    return run.has("cpu_buffer") and not run.has("cuda_malloc", "buffer", "buffer_mib")


def _wanted(run: LoggedRun) -> int:
    """Bytes of the buffer that was refused last, or 0."""
    for key, unit in (("cuda_malloc", "MiB"), ("buffer_mib", "MiB"), ("buffer", "bytes"), ("gallocr", "bytes"),
                      ("alloc_range", "bytes"), ("cpu_buffer", "bytes")):  # fmt: skip
        if (hit := run.last(key)) and (value := size(hit.groups[0 if unit == "MiB" else -1], unit, hit)):
            return value.nbytes
    return 0


def _vision_is_last(run: LoggedRun) -> bool:
    """Whether weights were placed after the vision encoder began to load, before any image."""
    began, refused = run.last("clip_start") or run.last("clip"), run.last("alloc_range")
    return bool(began and refused and began.line < refused.line and not run.has("clip_encode"))


def _picture(run: LoggedRun, refused: int) -> tuple[str, Confidence] | None:
    """(what the encoder did when a buffer was refused, how sure that is); None where it was not encoding."""
    begun = max((hit.line for hit in run.all("clip_encode") if hit.line <= refused), default=0)
    done = max((hit.line for hit in run.all("clip_done") if hit.line <= refused), default=0)
    if begun > done:
        return (
            "for the picture. The start tries one of 1472×1472; a larger one needs more, and nothing reserves it.",
            "likely",
        )
    trial = (
        0 if done or run.has("listening") else max((hit.line for hit in run.all("clip_warmup")), default=0)
    )
    if 0 < trial <= refused and not any(trial < hit.line <= refused for hit in run.all("n_ctx")):
        return "for the picture that the start tries in the vision encoder.", "likely"
    asserted = run.has("clip_failed") or (run.has("clip", "clip_compute") and run.has("ggml_assert"))
    return ("for the picture, it seems.", "possible") if asserted and not done else None


# Their message says that something failed elsewhere.
_WRAPPERS: Final = re.compile(
    r"Engine core initialization failed|Engine process failed to start|EngineDeadError|EngineCore encountered|WorkerProc initialization failed"
    r"|Engine loop |Background loop|CancelledError|KeyboardInterrupt|BrokenPipeError|ConnectionResetError|ChildFailedError|CalledProcessError|exiting due to"
    r"|[Ff]ailed to load (?:the )?(?:model|CLIP|vision|clip|multimodal)|unable to load model|llama_decode failed|failed to decode|Failed to create llama_context"
    r"|failed to initialize the context|^exit status \d|exception loading model|do load request: Post|llama runner process no longer running"
)


def last_exception(facts: RunFacts) -> list[Cause]:
    """The cause for a log that no rule knows: the innermost cause of its last exception, quoted."""
    run = facts.run
    up = came_up(run)
    late = {key: [hit for hit in run.all(key) if hit.line > up] for key in _LAST_WORDS}
    telling = {
        key: [hit for hit in hits if not _WRAPPERS.search(hit.groups[0])] for key, hits in late.items()
    }
    if hits := next((hits for hits in telling.values() if hits), None):
        return [_quoted(run, hits)]
    if hits := next((hits for hits in late.values() if hits), None):
        quoted = _quoted(run, hits)
        return [replace(quoted, explanation=f"{quoted.explanation} {_NO_CAUSE}")]
    known = [hit for key in run.failures for hit in run.all(key) if hit.line > up]
    if known:  # a line that says that something failed, of which no rule could tell why
        hit = max(known, key=lambda hit: hit.line)
        return [
            Cause("exception", "certain", f"The log says: {excerpt(hit.text, hit.start)}", (hit.evidence,))
        ]
    return []


_NO_CAUSE: Final = "(That says that something failed, not why; the cause stands in lines before it, or in the log of another process.)"
_LAST_WORDS: Final = ("raised", "error_line", "died", "trouble")


def _quoted(run: LoggedRun, hits: list[Hit]) -> Cause:
    hit = hits[-1]
    links = [link.line for link in run.all("direct_cause")]
    for earlier in reversed(hits[:-1]):
        if not any(earlier.line < link < hit.line for link in links):
            break
        hit = earlier
    said = hit.groups[0].rstrip(" :")
    kind = run.last("cxx_type")
    if "what()" in hit.text and kind:
        said = f"{kind.groups[0]}: {said}"
    return Cause("exception", "certain", f"The log says: {excerpt(said)}", (hit.evidence,))
