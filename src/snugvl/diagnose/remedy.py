"""From causes to changed flags, each with its reason, and a judgement of the engine's own advice."""

# ruff: noqa: E501 - one pattern or one whole sentence a line reads better than a wrapped one

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from snugvl.core.folders import json_object
from snugvl.diagnose.command import meant, refused_flags, removed_switches, suggestion
from snugvl.diagnose.facts import RunFacts
from snugvl.diagnose.memory import gib
from snugvl.diagnose.other import in_host_memory
from snugvl.diagnose.replan import (
    max_pixels,
    memory_changes,
    over_free_changes,
    plan_command,
    plan_of,
    safe_utilisation,
)
from snugvl.diagnose.result import Cause, Change, Kind, known
from snugvl.planner.plan import Choice

Fix = Callable[[RunFacts, Choice | None], list[Change]]


def changes(facts: RunFacts, causes: Sequence[Cause]) -> tuple[Change, ...]:
    """The changes, one a flag; the first cause that touches a flag decides."""
    if facts.engine not in ("vllm", None) and not facts.command:
        table = {"ollama": "ollama", "llama.cpp": "llamacpp"}.get(facts.engine, "pytorch")
        told = [change for cause in causes for change in _told(facts, table, cause.kind)]
        return _once(_or_less(facts, change) for change in told)
    hopeless = any(cause.kind == "weights" and cause.confidence == "certain" for cause in causes)
    planned = {"vision_profile", "context", "utilisation_low", "utilisation_over_free", "tenants"}
    choice = None
    if not hopeless and planned & {cause.kind for cause in causes}:
        choice = plan_of(facts)
    found: list[Change] = []
    for cause in causes:
        if cause.kind in _FIXES and not (hopeless and cause.kind in planned):
            found += _FIXES[cause.kind](facts, choice)
        found += _told(facts, "settings", cause.kind)
    return _once(_or_less(facts, _with_old(facts, change)) for change in found)


def _or_less(facts: RunFacts, change: Change) -> Change:
    """The change, worded for the case that the unknown command has a smaller value already."""
    if facts.command or change.flag not in _AMOUNTS or not change.new:
        return change
    return replace(change, why=f"{change.why}; leave it where it is less already")


def _once(found: Iterable[Change]) -> tuple[Change, ...]:
    first: dict[str, Change] = {}
    for change in found:
        first.setdefault(change.flag, change)
    return tuple(change for change in first.values() if not _same(change.old, change.new))


def _same(old: str | None, new: str | None) -> bool:
    """Whether two values of a flag mean the same: JSON may have spaces."""
    if old is None or new is None or old == new:
        return old is not None and old == new
    value = json_object(old)
    return value is not None and value == json_object(new)


def _with_old(facts: RunFacts, change: Change) -> Change:
    old = None
    if facts.command:
        old = facts.command.get(change.flag) or dict(facts.command.env).get(change.flag)
        if old is None and facts.command.has(change.flag):
            old = ""
    return replace(change, old=old, new=_merged(old, change.new))


def _merged(old: str | None, new: str | None) -> str | None:
    """The new value of a flag; of JSON objects the old one's other keys stay."""
    before, after = json_object(old or ""), json_object(new or "")
    if before is None or after is None:
        return new
    return json.dumps({**before, **after}, separators=(",", ":")) if before.keys() - after.keys() else new


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
    if facts.run.has("port_torch") or not (facts.command or facts.engine == "vllm"):
        return []  # another port than the server's, or a server whose options are others
    old = facts.command.get("--port") if facts.command else None
    port = int(old) + 1 if old and old.isdigit() and int(old) < 65_535 else 8001
    return [Change("--port", None, str(port), "or end the server that listens there: ss -ltnp names it")]


def _dtype(facts: RunFacts, choice: Choice | None) -> list[Change]:
    return [Change("--dtype", None, "half", "this GPU computes in float16")] if facts.run.has("bf16") else []


def _beside_others(facts: RunFacts, choice: Choice | None) -> list[Change]:
    """Changes to less memory than others leave free, where vLLM was refused memory that it had counted on."""
    counted = facts.engine == "vllm" and facts.free and facts.run.has("frame_kv")
    return memory_changes(facts, choice) if counted else []


def _more_images(facts: RunFacts, choice: Choice | None) -> list[Change]:
    """The change to `SOME_IMAGES` images where fewer were allowed; the log doesn't say how many were sent."""
    hit = facts.run.last("images")
    if not hit or int(hit.groups[0]) >= SOME_IMAGES:
        return []
    value = json.dumps({hit.groups[1]: SOME_IMAGES}, separators=(",", ":"))
    return [Change("--limit-mm-per-prompt", None, value, f"or send fewer {hit.groups[1]}s in a request")]


def _tensor_parallel(facts: RunFacts, choice: Choice | None) -> list[Change]:
    """Changes from vLLM's own message: GPUs that divide the heads, or the longest context of the model."""
    said = hit.named if (hit := facts.run.last("refused")) else {}
    found = []
    if said.get("heads"):
        heads, ranks = int(said["heads"]), int(said["ranks"])
        fewer = next((n for n in range(min(ranks, heads), 0, -1) if heads % n == 0), 1)
        found.append(
            Change("--tensor-parallel-size", None, str(fewer), f"{heads} heads are shared equally by {fewer}")
        )
    if said.get("ranks_wanted") and facts.command:
        alone = facts.command.get("--tensor-parallel-size") == said["ranks_wanted"]
        why = "more GPUs than that are not visible here"
        found += [Change("--tensor-parallel-size", None, said["gpus"], why)] if alone else []
    if said.get("derived"):
        found.append(Change("--max-model-len", None, said["derived"], "the longest context of the model"))
    return found


def _serving(facts: RunFacts, choice: Choice | None) -> list[Change]:
    """Changes to less KV cache, so that a step larger than those at start has room."""
    less = []
    if facts.utilisation_given and facts.utilisation:  # another's default may be above what it had
        value = f"{max(facts.utilisation - 0.05, 0.1):.2g}"
        less = [Change("--gpu-memory-utilization", None, value, "leaves room for larger steps")]
    old = facts.command.get("--max-num-batched-tokens") if facts.command else None
    if old and old.isdigit() and int(old) <= 2048:
        return less
    return [*less, Change("--max-num-batched-tokens", None, "2048", "smaller steps take less memory")]


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
    "tenants": _beside_others, "too_many_images": _more_images,
    "unknown_flag": _gone, "removed_switch": _gone, "port": _port, "dtype": _dtype,
    "settings": _tensor_parallel, "serving_memory": _serving, "compiler": _compiler,
}  # fmt: skip


def _told(facts: RunFacts, table: str, kind: Kind) -> list[Change]:
    """Changes that a table of `known.toml` has for a cause, without those that this run has or can't use."""
    told = (Change(old=None, **change) for change in known()[table].get(kind, ()))
    return [change for each in told if (change := _fitting(facts, each))]


def _fitting(facts: RunFacts, change: Change) -> Change | None:
    new = change.new or ""
    if change.flag == "PYTORCH_CUDA_ALLOC_CONF":  # PyTorch's message has the name that its build reads
        said = facts.run.last("alloc_conf")
        if said is None and facts.run.has("not_cuda"):
            return None
        return replace(change, flag=said.groups[0]) if said else change
    if change.flag == "--no-mmproj-offload" and in_host_memory(facts.run):
        return None  # images are encoded on the CPU already
    used = facts.context if change.flag in _CONTEXT else None
    given = facts.command.get(change.flag) if facts.command else None
    used = int(given) if given and given.isdigit() else used
    return None if used and new.isdigit() and used <= int(new) else change


def advice(facts: RunFacts, causes: Sequence[Cause]) -> str:
    """The sentence on vLLM's own advice, where it gives any, and whether it is right; or ""."""
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


_MEMORY: Final = ("vision_profile", "context", "weights", "out_of_memory", "utilisation_low", "tied_head")
SOME_IMAGES: Final = 4
_AMOUNTS: Final = (
    "--max-num-seqs", "--max-num-batched-tokens", "-c", "-ub", "--image-max-tokens", "OLLAMA_CONTEXT_LENGTH",
)  # fmt: skip
_CONTEXT: Final = ("-c", "OLLAMA_CONTEXT_LENGTH")
_VALUED: Final = (
    "--max-model-len",
    "--mm-processor-kwargs",
    "-c",
    "OLLAMA_CONTEXT_LENGTH",
)  # a new value is given


def notes(facts: RunFacts, causes: Sequence[Cause], found: Sequence[Change]) -> tuple[str, ...]:
    """Notes on what to do beside flags, and on what to run where a number could not be computed."""
    run, tables = facts.run, known()
    valued = any(change.flag in _VALUED for change in found)
    line, answered = _by_line(facts, causes)
    if valued:
        answered |= {"vision_profile"}
    if facts.utilisation_given:
        answered |= {"serving_memory"}
    if facts.free:
        answered |= {"utilisation_low"}
    kinds = [cause.kind for cause in causes if cause.kind not in answered]
    said = [tables["notes"][kind] for kind in kinds if kind in tables["notes"]] + line
    unknown = any(cause.kind in _MEMORY for cause in causes) and not valued and not run.has("block_limit")
    if unknown and not any("{plan}" in note for note in said):
        said.append("The log has too few numbers to compute flags from; `{plan}` says what fits.")
    if not any("{plan}" in note for note in said):
        return tuple(dict.fromkeys(said))
    plan = plan_command(facts)
    if "--vram" in plan and "--held" not in plan:
        said.append(
            "The log does not say what other programs hold on that GPU: `nvidia-smi` shows it, and for example `--held 900MiB` gives it to the plan."
        )
    return tuple(note.replace("{plan}", plan) for note in dict.fromkeys(said))


def _by_line(facts: RunFacts, causes: Sequence[Cause]) -> tuple[list[str], set[str]]:
    """(remedies by the line that showed a cause, the first in the table; the causes that they answer)."""
    table: Mapping[str, str] = known()["notes_by_line"]
    of_vllm = facts.engine == "vllm"
    lines = (key for key in table if causes and facts.run.has(key) and not (of_vllm and key == "frame_tower"))
    key = next(lines, None)
    hit = facts.run.last(key) if key else None
    if key is None or hit is None:
        return [], set()
    model = facts.model if re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", facts.model or "") else "MODEL"
    text = table[key].replace("{model}", model or "MODEL")
    text = text.replace(
        "{engine}", {"vllm": "vllm", "transformers": "transformers"}.get(facts.engine or "", "ENGINE")
    )
    for number, group in enumerate(hit.groups):
        text = text.replace(f"{{{number}}}", group)
    return [text], {kind for keys, kind, *_ in known()["causes"] if key in keys}
