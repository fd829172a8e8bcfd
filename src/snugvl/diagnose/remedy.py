"""From causes to changed flags, each with its reason, and a word on the engine's own advice."""

# ruff: noqa: E501 - one pattern or one whole sentence a line reads better than a wrapped one

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from snugvl.diagnose.command import meant, refused_flags, removed_switches, suggestion
from snugvl.diagnose.facts import RunFacts
from snugvl.diagnose.memory import gib
from snugvl.diagnose.replan import (
    max_pixels,
    memory_changes,
    over_free_changes,
    plan_command,
    plan_of,
    safe_utilisation,
)
from snugvl.diagnose.result import Cause, Change, Kind
from snugvl.planner.plan import Choice

Fix = Callable[[RunFacts, Choice | None], list[Change]]


def changes(facts: RunFacts, causes: Sequence[Cause]) -> tuple[Change, ...]:
    """What to change, one entry a flag; the first cause that touches a flag decides."""
    if facts.engine not in ("vllm", None) and not facts.command:
        elsewhere = _OLLAMA if facts.engine == "ollama" else _ELSEWHERE
        return _once(change for cause in causes for change in elsewhere.get(cause.kind, ()))
    hopeless = any(cause.kind == "weights" and cause.confidence == "certain" for cause in causes)
    planned = {"vision_profile", "context", "utilisation_low", "utilisation_over_free"}
    choice = None
    if not hopeless and planned & {cause.kind for cause in causes}:
        choice = plan_of(facts)
    found: list[Change] = []
    for cause in causes:
        if cause.kind in _FIXES and not (hopeless and cause.kind in planned):
            found += _FIXES[cause.kind](facts, choice)
        found += _SETTINGS.get(cause.kind, ())
    return _once(_with_old(facts, change) for change in found)


def _once(found: Iterable[Change]) -> tuple[Change, ...]:
    first: dict[str, Change] = {}
    for change in found:
        first.setdefault(change.flag, change)
    return tuple(change for change in first.values() if not _same(change.old, change.new))


def _same(old: str | None, new: str | None) -> bool:
    """Whether two values of a flag mean the same: JSON may have spaces."""
    if old is None or new is None or old == new:
        return old is not None and old == new
    try:
        return bool(old.startswith("{") and json.loads(old) == json.loads(new))
    except ValueError:
        return False


def _with_old(facts: RunFacts, change: Change) -> Change:
    old = None
    if facts.command:
        old = facts.command.get(change.flag) or dict(facts.command.env).get(change.flag)
        if old is None and facts.command.has(change.flag):
            old = ""
    return replace(change, old=old)


def _encoder_cache(facts: RunFacts, choice: Choice | None) -> list[Change]:
    hit = facts.run.last("encoder_small")
    per_token = facts.known.pixels_per_token if facts.known else 0
    limit = int(hit.groups[2]) * per_token if hit and per_token else max_pixels(facts)
    if not limit:
        return []
    value = json.dumps({"max_pixels": limit}, separators=(",", ":"))
    why = (
        "larger images are scaled down to what the cache holds; --limit-mm-per-prompt only shapes the profile"
    )
    return [Change("--mm-processor-kwargs", None, value, why)]


def _prompt(facts: RunFacts, choice: Choice | None) -> list[Change]:
    hit = facts.run.last("prompt_long")
    if not hit:
        return []
    wanted = -(-(int(hit.named["length"]) + 512) // 1024) * 1024
    if facts.kv and facts.kv_token and wanted * facts.kv_token.nbytes > facts.kv.nbytes:
        return []
    return [Change("--max-model-len", None, str(wanted), "the prompt and 512 tokens of answer")]


def _gone(facts: RunFacts, choice: Choice | None) -> list[Change]:
    found = []
    for name in sorted({*removed_switches(facts.command, facts.run), *refused_flags(facts.run)}):
        found.append(Change(name, None, None, suggestion(name)))
        near = meant(name)
        if near and facts.command and not facts.command.has(near):
            found.append(Change(near, None, facts.command.get(name) or "", f"for {name}"))
    return found


def _port(facts: RunFacts, choice: Choice | None) -> list[Change]:
    old = facts.command.get("--port") if facts.command else None
    port = int(old) + 1 if old and old.isdigit() and int(old) < 65_535 else 8001
    return [Change("--port", None, str(port), "or end the server that listens there: ss -ltnp names it")]


def _dtype(facts: RunFacts, choice: Choice | None) -> list[Change]:
    return [Change("--dtype", None, "half", "this GPU computes in float16")] if facts.run.has("bf16") else []


def _tensor_parallel(facts: RunFacts, choice: Choice | None) -> list[Change]:
    """What vLLM's own message has: GPUs that divide the heads, or the longest context of the model."""
    said = hit.named if (hit := facts.run.last("refused")) else {}
    found = []
    if said.get("heads"):
        heads, ranks = int(said["heads"]), int(said["ranks"])
        fewer = next((n for n in range(min(ranks, heads), 0, -1) if heads % n == 0), 1)
        found.append(
            Change("--tensor-parallel-size", None, str(fewer), f"{heads} heads are shared equally by {fewer}")
        )
    if said.get("derived"):
        found.append(Change("--max-model-len", None, said["derived"], "the longest context of the model"))
    return found


def _serving(facts: RunFacts, choice: Choice | None) -> list[Change]:
    """Less for the KV cache, so that a step that is larger than those of the start has room."""
    used = facts.utilisation or 0.9
    less = Change(
        "--gpu-memory-utilization", None, f"{max(used - 0.05, 0.1):.2g}", "leaves room for larger steps"
    )
    old = facts.command.get("--max-num-batched-tokens") if facts.command else None
    if old and old.isdigit() and int(old) <= 2048:
        return [less]
    return [less, Change("--max-num-batched-tokens", None, "2048", "smaller steps take less memory")]


def _compiler(facts: RunFacts, choice: Choice | None) -> list[Change]:
    if facts.run.has("ptxas"):
        why = "the ptxas of an installed CUDA toolkit that knows this GPU"
        return [Change("TRITON_PTXAS_PATH", None, "/usr/local/cuda/bin/ptxas", why)]
    if facts.run.has("sampling_kernels"):
        return [
            Change(
                "VLLM_USE_FLASHINFER_SAMPLER",
                None,
                "0",
                "vLLM samples with PyTorch; nothing is compiled for it",
            )
        ]
    return []


_FIXES: Final[Mapping[Kind, Fix]] = {
    "vision_profile": memory_changes, "context": memory_changes, "utilisation_low": memory_changes,
    "utilisation_over_free": over_free_changes,
    "encoder_cache": _encoder_cache, "prompt_too_long": _prompt,
    "unknown_flag": _gone, "removed_switch": _gone, "port": _port, "dtype": _dtype,
    "settings": _tensor_parallel, "serving_memory": _serving, "compiler": _compiler,
}  # fmt: skip
_EXPANDABLE: Final = Change(
    "PYTORCH_CUDA_ALLOC_CONF",
    None,
    "expandable_segments:True",
    "joins freed pieces; some WSL2 drivers refuse it, then leave it out",
)
_SETTINGS: Final[Mapping[Kind, tuple[Change, ...]]] = {
    "cuda_graphs": (
        Change("--max-num-seqs", None, "8", "graphs are captured up to this batch size"),
        Change("--cudagraph-capture-sizes", None, "1 2 4 8", "four graphs instead of dozens; --enforce-eager needs none but decodes slower"),
    ),
    "batch": (Change("--max-num-seqs", None, "8", "the warm-up runs this many sequences at once"),),
    "too_many_images": (Change("--limit-mm-per-prompt", None, '{"image":4,"video":0}', "or send fewer images in a request"),),
    "uva": (
        Change("VLLM_WSL2_ENABLE_PIN_MEMORY", None, "1", "allows pinned memory (WSL2 kernel 4.19.121 or later); vLLM from 2026-09-14 on falls back by itself"),
    ),
    "fragmentation": (_EXPANDABLE,),
    "communication": (Change("NCCL_P2P_DISABLE", None, "1", "GPUs that cannot reach each other directly go through main memory"),),
    "forked_cuda": (Change("VLLM_WORKER_MULTIPROC_METHOD", None, "spawn", "workers start anew instead of as a copy"),),
}  # fmt: skip
# For engines whose command is not read: llama.cpp, and with other words Ollama; PyTorch.
_ELSEWHERE: Final[Mapping[Kind, tuple[Change, ...]]] = {
    "fragmentation": (_EXPANDABLE,),
    "image_buffer": (
        Change("--image-max-tokens", None, "1024", "smaller images, smaller buffer; 1024 tokens still locate objects"),
        Change("--no-mmproj-offload", None, "", "or encode images on the CPU, slowly"),
    ),
    "vision_weights": (Change("--no-mmproj-offload", None, "", "images are encoded on the CPU, slowly; or fewer layers on the GPU (-ngl)"),),
    "context": (Change("-c", None, "4096", "a shorter context"),),
    "compute_buffer": (Change("-ub", None, "128", "a smaller physical batch"), Change("-c", None, "4096", "a shorter context")),
}  # fmt: skip
_OLLAMA: Final[Mapping[Kind, tuple[Change, ...]]] = {
    "context": (Change("OLLAMA_CONTEXT_LENGTH", None, "4096", "a shorter context"),),
    "compute_buffer": (
        Change("OLLAMA_CONTEXT_LENGTH", None, "4096", "a shorter context, whose compute buffer is smaller"),
    ),
    "vision_weights": (
        Change("OLLAMA_CONTEXT_LENGTH", None, "4096", "a shorter context leaves room for the encoder"),
    ),
}


def advice(facts: RunFacts, causes: Sequence[Cause]) -> str:
    """vLLM's advice, where it gives one, and whether it is right."""
    run = facts.run
    kinds = {cause.kind for cause in causes}
    if run.has("load_failed"):
        return "vLLM says to lower gpu_memory_utilization: wrong, it does not limit the weights. A smaller format of the model, or a larger GPU, does."
    if run.has("encoder_small") and run.has("images", "encoder_small"):
        return "vLLM says to raise --limit-mm-per-prompt: that shapes the profile only and costs memory; --mm-processor-kwargs max_pixels scales the images."
    if not run.has("no_blocks", "kv_short", "kv_short_tokens", "autofit_failed"):
        return ""
    said = "vLLM says to increase gpu_memory_utilization: "
    safe = safe_utilisation(facts) if facts.free else None
    if safe is not None and facts.utilisation and safe <= facts.utilisation:
        return f"{said}wrong here, {facts.utilisation:g} is already all that is free."
    if "utilisation_low" in kinds:
        return f"{said}right here, as long as nothing else holds the rest of the card."
    gap = _gap(facts)
    if gap and facts.total and facts.utilisation:
        gain = round((1 - facts.utilisation) * facts.total.nbytes)
        if gain < gap:
            return f"{said}wrong here, even the whole card adds {gib(gain)} and {gib(gap)} are missing."
    if kinds & {"vision_profile", "context", "weights"}:
        return f"{said}it treats the symptom; what was reserved is larger than what is used, and raising it past what is free fails at the next start."
    return f"{said}that helps only if more of the card is free than it uses now."


def _gap(facts: RunFacts) -> int | None:
    if not facts.kv:
        return None
    return (facts.kv_needed.nbytes if facts.kv_needed else 0) - facts.kv.nbytes


_MEMORY: Final = (
    "vision_profile",
    "context",
    "weights",
    "out_of_memory",
    "utilisation_low",
    "cuda_graphs",
    "tied_head",
)
_VALUED: Final = (
    "--max-model-len",
    "--mm-processor-kwargs",
    "-c",
    "OLLAMA_CONTEXT_LENGTH",
)  # a new value is given
_BUILD_TOOLS: Final = (
    "Install a C compiler and Python's headers: `sudo apt install build-essential python3-dev`."
)
_NOTES: Final[Mapping[Kind, str]] = {
    "tenants": "Close what holds GPU memory (browsers, games, other engines; `nvidia-smi` lists them, on Windows the Task Manager does).",
    "profiling_disturbed": "Start again once other programs have settled; nothing in the command is wrong.",
    "weights": "Take a smaller format or model: `{plan}` lists what fits this GPU.",
    "fp8_kernels": "Take the bf16 checkpoint if it fits, or a 4-bit one; on Ampere vLLM reads FP8 weights only through Marlin (update vLLM).",
    "driver": "Install a driver for your CUDA version (under WSL2 in Windows, never inside Linux), or PyTorch built for the driver that is there.",
    "model_access": "Check the name, accept the licence on the model's page, log in with `hf auth login`, or name a local folder.",
    "host_killed": "Give the process more RAM or swap; under WSL2 raise memory= in .wslconfig, in containers the memory limit.",
    "host_memory": "Free RAM or take a smaller model.",
    "shared_memory": "Start the container with --ipc=host or --shm-size=8g.",
    "tied_head": "A version that reads tie_word_embeddings does not load the stored head; update the engine.",
    "spill": "Stay below the card's free memory: a shorter context or smaller images; WSL2 ignores the driver's setting against it.",
    "residency": "Lower --gpu-memory-utilization by 0.05 to 0.1 and close programs on the Windows side.",
    "cpu_offload": "Take a smaller format, or place the model deliberately: `{plan}` says what fits and what offloading costs.",
    "image_buffer": "Smaller images need less; nothing else in the command helps.",
    "prompt_too_long": "Send smaller or fewer images, or raise the context if the KV cache allows it.",
}


# The same by the line that told the cause: the first that the log has.
_NOTES_BY_LINE: Final[tuple[tuple[str, str], ...]] = (
    ("no_compiler", _BUILD_TOOLS), ("python_h", _BUILD_TOOLS), ("cc_failed", _BUILD_TOOLS),
    ("no_nvcc", "Install the CUDA toolkit of the version that PyTorch was built for, then `export CUDA_HOME=/usr/local/cuda`, one folder without a colon."),
    ("nvcc_failed", "Install the CUDA toolkit of the version that PyTorch was built for, `export CUDA_HOME=/usr/local/cuda`, and `rm -r ~/.cache/flashinfer`."),
    ("ninja", "Remove what was half built, `rm -r ~/.cache/flashinfer`, and start again; the compiler's message says what it lacks."),
    ("amd_kernel", "Choose the GPU that the build has code for (`rocminfo` has the gfx numbers): `export HIP_VISIBLE_DEVICES=0`; or build the engine for this gfx number."),
    ("device_function", "Build the engine for this GPU's architecture, or take a newer release of it."),
    ("xformers", "See what it can do with `python -m xformers.info`, and install the one for this PyTorch: `pip install -U xformers`."),
    ("triton_shared", "Take another format of the weights: bf16 or AWQ run on this GPU without this kernel."),
    ("damaged", "Fetch the files again: `hf download {model} --force-download`, or `ollama pull {model}`. If nothing changes, update the engine: an older one expects other tensors."),
    ("weight_shape", "Check that config.json belongs to these files, and --quantization: 4-bit files of bitsandbytes need `--quantization bitsandbytes`."),
    ("arch_gguf", "Update Ollama or llama.cpp, or take a GGUF made for the installed one."),
    ("arch_hf", "Update: `pip install -U transformers`."), ("arch_vllm", "Update: `pip install -U vllm transformers`."),
    ("symbol", "Install engine and PyTorch together in a fresh environment: `python3 -m venv ~/engine && ~/engine/bin/pip install vllm`."),
    ("numba", "Install an older NumPy: `pip install 'numpy<={numpy}.99'`."),
    ("no_module", "Install what needs it anew, in a fresh environment: `python3 -m venv ~/engine && ~/engine/bin/pip install vllm`."),
    ("flash_attn", "Load with attn_implementation=\"sdpa\", or `pip install flash-attn --no-build-isolation`."),
    ("bnb", "`pip install -U bitsandbytes`; `python -m bitsandbytes` says what it looks for."),
    ("nccl_memory", "NCCL's buffers lie beside vLLM's share of the card: lower `--gpu-memory-utilization` by 0.05."),
    ("nccl", "`export NCCL_DEBUG=INFO` makes NCCL say what it could not reach."),
)  # fmt: skip


def notes(facts: RunFacts, causes: Sequence[Cause], found: Sequence[Change]) -> tuple[str, ...]:
    """What to do beside flags, and what to run where a number could not be computed."""
    run = facts.run
    said = [_NOTES[cause.kind] for cause in causes if cause.kind in _NOTES]
    if causes and (line := next((text for key, text in _NOTES_BY_LINE if run.has(key)), "")):
        hit = run.last("numba")
        model = facts.model if re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", facts.model or "") else "MODEL"
        said.append(
            line.replace("{numpy}", hit.groups[0] if hit else "").replace("{model}", model or "MODEL")
        )
    unknown = any(cause.kind in _MEMORY for cause in causes) and not any(
        change.flag in _VALUED for change in found
    )
    if unknown and not any("{plan}" in note for note in said):
        said.append("The log has too few numbers for new values; `{plan}` computes them.")
    plan = plan_command(facts) if any("{plan}" in note for note in said) else ""
    return tuple(note.replace("{plan}", plan) for note in dict.fromkeys(said))
