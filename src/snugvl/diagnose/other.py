"""Causes that are no matter of the budget: platform, kernels, flags, access, the host; and llama.cpp's."""

# ruff: noqa: E501 - one pattern or one whole sentence a line reads better than a wrapped one

from typing import Final

from snugvl.diagnose.command import removed, suggestion
from snugvl.diagnose.facts import GIB, MIB, RunFacts, size
from snugvl.diagnose.memory import cause, gib
from snugvl.diagnose.result import Cause, Confidence, Kind

# Lines that name their cause by themselves: (kinds of line, cause, how sure, what it means).
_PLAIN: Final[tuple[tuple[tuple[str, ...], Kind, Confidence, str], ...]] = (
    (("uva",), "uva", "certain", "vLLM's newer model runner keeps its tables in pinned memory that the GPU reads; vLLM switches pinned memory off under WSL2."),
    (("resident",), "residency", "certain", "dxgkio_make_resident failed: Windows had no room on the GPU although the driver reported some as free."),
    (("fp8e4nv",), "fp8_kernels", "certain", "A Triton FP8 kernel was chosen that needs compute capability 8.9 or later."),
    (("scaled_mm", "fp8_hf"), "fp8_kernels", "certain", "FP8 matrix products need compute capability 8.9 or later."),
    (("driver_old", "ptx"), "driver", "certain", "The driver is older than the CUDA version that PyTorch was built for."),
    (("sm_unsupported",), "driver", "certain", "This build of PyTorch has no code for this GPU's compute capability."),
    (("driver_none", "nvml"), "driver", "certain", "No NVIDIA driver is visible to the process."),
    (("dispatch", "meta_cpu", "ollama_none"), "cpu_offload", "certain", "The device map put part of the model outside the GPU because it did not fit."),
    (("bnb_cpu",), "driver", "certain", "bitsandbytes was installed without GPU support."),
    (("arch_hf", "arch_vllm"), "architecture", "certain", "The model's architecture is newer than the installed library."),
    (("gated",), "model_access", "certain", "The model's licence has to be accepted first, and a token has to be set."),
    (("missing_model",), "model_access", "certain", "There is no such folder, and no such model that you may see."),
    (("hub_offline",), "model_access", "likely", "The files are not in the local cache and could not be fetched."),
    (("port",), "port", "certain", "Another server, perhaps an earlier start that is still running, listens there."),
    (("killed",), "host_killed", "certain", "The process was ended from outside; loading weights needs system memory too."),
    (("shm",), "shared_memory", "certain", "Worker processes talk through /dev/shm, which containers limit to 64 MiB by default."),
    (("bus_error",), "shared_memory", "possible", "A bus error while workers start usually means that /dev/shm is full."),
    (("ollama_host",), "host_memory", "certain", "Ollama keeps in system memory what the GPU does not hold."),
    (("shared_gpu",), "spill", "likely", "Windows shows shared GPU memory in use: part of the model lies in system memory."),
)  # fmt: skip


def plain(facts: RunFacts) -> list[Cause]:
    """Lines that speak for themselves."""
    found = []
    for keys, kind, confidence, text in _PLAIN:
        if facts.run.has(*keys):
            found.append(cause(facts, kind, confidence, text, *keys))
    if facts.run.has("killed_bare") and not facts.run.has("killed"):
        text = "The shell reports the process as killed; loading weights needs system memory too."
        found.append(cause(facts, "host_killed", "likely", text, "killed_bare"))
    if facts.run.has("smi_missing"):
        where = "; under WSL2 it lies in /usr/lib/wsl/lib" if facts.wsl2 else ""
        found.append(cause(facts, "driver", "likely", f"nvidia-smi was not found{where}.", "smi_missing"))
    return found


def kernels(facts: RunFacts) -> list[Cause]:
    """No code for this GPU: of PyTorch, or only of the FP8 products; or a format that it cannot compute in."""
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
    if hit := run.last("bf16"):
        text = f"bfloat16 needs compute capability {hit.groups[0]}; {hit.groups[1]} has {hit.groups[2]}."
        found.append(cause(facts, "dtype", "certain", text, "bf16"))
    return found


def _dotted(capability: str) -> str:
    return f"{capability[:-1]}.{capability[-1]}" if len(capability) > 1 else capability


def requests(facts: RunFacts) -> list[Cause]:
    """A running server refused a request."""
    run = facts.run
    found = []
    if hit := run.last("encoder_small"):
        text = f"The {hit.groups[0]} has {int(hit.groups[1]):,} tokens; the encoder cache was built for {int(hit.groups[2]):,}."
        found.append(cause(facts, "encoder_cache", "certain", text, "encoder_small"))
    if hit := run.last("prompt_long"):
        length = hit.named.get("length") or hit.groups[0]
        limit = hit.named.get("limit") or hit.groups[1]
        text = f"The prompt has {int(length):,} tokens, image tokens included; the context is {int(limit):,}."
        found.append(cause(facts, "prompt_too_long", "certain", text, "prompt_long"))
    for key in ("ctx_exceeded", "ollama_cut"):
        if hit := run.last(key):
            length, limit = hit.groups if key == "ctx_exceeded" else (hit.groups[1], hit.groups[0])
            cut = " Ollama silently cut its beginning." if key == "ollama_cut" else ""
            text = f"The prompt has {int(length):,} tokens, image tokens included; the context is {int(limit):,}.{cut}"
            found.append(cause(facts, "prompt_too_long", "certain", text, key))
    if hit := run.last("images"):
        text = f"{hit.groups[0]} {hit.groups[1]}(s) are allowed in a request."
        found.append(cause(facts, "too_many_images", "certain", text, "images"))
    return found


def flags(facts: RunFacts) -> list[Cause]:
    """Flags and variables that this or every vLLM does not know."""
    run = facts.run
    found = []
    unknown: list[str] = []
    if hit := run.last("bad_flags"):
        unknown += [word.partition("=")[0] for word in hit.groups[0].split() if word.startswith("-")][:20]
    if hit := run.last("bad_keyword"):
        unknown.append("--" + hit.groups[0].replace("_", "-"))
    if unknown:
        said = " ".join(f"{flag}: {suggestion(flag)}" for flag in unknown)
        found.append(cause(facts, "unknown_flag", "certain", said, "bad_flags", "bad_keyword"))
    used = {name for name, _ in facts.command.flags} if facts.command else set()
    used |= (
        {name for name, value in facts.command.env if name != "VLLM_USE_V1" or value == "0"}
        if facts.command
        else set()
    )
    for key in ("bad_env", "deprecated_flag"):
        used |= {hit.groups[0] for hit in run.all(key)}
    if run.has("env_v1"):
        used.add("VLLM_USE_V1")
    gone = [name for name in sorted(used) if removed(name) and name not in unknown]
    if gone:
        said = " ".join(f"{name}: {removed(name)}" for name in gone)
        keys = ("bad_env", "deprecated_flag", "env_v1", "command")
        found.append(cause(facts, "removed_switch", "certain", said, *keys))
    return found


def settings(facts: RunFacts) -> list[Cause]:
    """vLLM's check of its own settings failed; for where no other rule knows why. Its message says it."""
    hit = facts.run.last("refused")
    if hit is None:
        return []
    said = hit.groups[0].removeprefix("Value error, ").rstrip(".")
    if "int() with base 10: 'GPU-" in said:  # or 'MIG-…', for which there are no numbers
        said += ". CUDA_VISIBLE_DEVICES has names of GPUs; this version takes their numbers alone"
    return [cause(facts, "settings", "certain", f"{said}.", "refused")]


def llama(facts: RunFacts) -> list[Cause]:
    """llama.cpp and Ollama ran out of GPU memory: weights, KV cache, compute buffer or the image's buffer."""
    run = facts.run
    if not run.has("cuda_malloc", "gallocr", "alloc_range", "vk_oom", "oom_bare") or facts.engine not in (
        "llama.cpp",
        "ollama",
    ):
        return []
    wanted = size(hit.groups[0], "MiB", hit) if (hit := run.last("cuda_malloc")) else None
    asked = f"A buffer of {gib(wanted.nbytes)} was refused" if wanted else "A buffer was refused"
    keys = ("cuda_malloc", "gallocr", "alloc_range", "vk_oom")
    if run.has("alloc_range"):
        return [
            cause(facts, "weights", "likely", f"{asked} while the weights were placed on the GPU.", *keys)
        ]
    if (
        run.has("clip_encode")
        or run.has("clip_failed")
        or (run.has("clip", "clip_compute") and run.has("ggml_assert"))
    ):
        text = f"{asked} for the picture. The start tries one of 1472×1472; a larger one needs more, and nothing reserves it."
        sure: Confidence = "likely" if run.has("ggml_assert", "clip_encode") else "possible"
        return [cause(facts, "image_buffer", sure, text, *keys, "ggml_assert", "clip_encode", "clip_failed")]
    if facts.context and wanted and wanted.nbytes > 64 * MIB and run.has("n_ctx"):
        sure = "likely" if facts.context > 16384 or wanted.nbytes > GIB else "possible"
        return [
            cause(
                facts, "context", sure, f"{asked} for a context of {facts.context:,} tokens.", "n_ctx", *keys
            )
        ]
    return [cause(facts, "out_of_memory", "certain", f"{asked}.", *keys, "oom_bare")]
