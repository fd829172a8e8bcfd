"""The planner's answer for the machine of a log: new values for vLLM's memory, and a command that plans.

The solver is the planner's. The GPU is described by the log, the model by the catalogue; where the planner
does not know the model, vLLM's own message has the longest context.
"""

# ruff: noqa: E501 - one whole sentence a line reads better than a wrapped one

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from snugvl.core.folders import json_object
from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import MIB
from snugvl.diagnose.facts import RunFacts
from snugvl.diagnose.memory import gib
from snugvl.diagnose.result import Change
from snugvl.errors import SnugvlError
from snugvl.hardware import gpus
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import Gpu, Machine
from snugvl.planner.budget import budgets
from snugvl.planner.engines.vllm.rules import utilisation, vllm_flags
from snugvl.planner.plan import Choice
from snugvl.planner.recommend import catalogue_candidates
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes

# What vLLM has in "Model loading took": the weights, and the buffers that are made with them.
# Lines with the card's memory in the words of CUDA; nvidia-smi's are those of the driver.
_CUDA_SAYS: Final = ("over_free", "summary", "v0_ceiling", "oom_new", "oom_old")
# Flags of which a smaller value than the plan's is kept: it takes less.
_AT_MOST: Final = ("--max-num-seqs", "--max-num-batched-tokens")


def machine_of(facts: RunFacts) -> Machine | None:
    """The GPU of the log as a machine to plan for, before vLLM started; None where its memory is not known."""
    if not facts.total or facts.total.nbytes <= 0 or facts.run.has("not_cuda"):
        return None  # what is planned with below is CUDA's: its context, its libraries, its kernels
    total = facts.total.nbytes
    free = max(0, min(facts.free.nbytes, total)) if facts.free else total
    system = "wsl2" if facts.wsl2 else "linux"
    try:
        machine = describe(_gpu_name(facts), vram=total, held=total - free, ram="16GiB", os=system)
    except SnugvlError:
        return None
    if facts.run.has("smi_row") and not facts.run.has(*_CUDA_SAYS):
        return machine
    # vLLM and PyTorch say CUDA's total of the card, and vLLM looks when its CUDA context is there already.
    if facts.run.has("over_free", "summary"):
        free = min(free + budgets(machine)[0].device.context_bytes, total)
    (gpu,) = machine.gpus
    told = replace(Gpu(0, gpu.name, total, free), compute_capability=gpu.compute_capability)
    told = replace(told, bandwidth=gpu.bandwidth, bf16_flops=gpu.bf16_flops, cycles_per_s=gpu.cycles_per_s)
    return replace(machine, gpus=(told,))


def _gpu_name(facts: RunFacts) -> str | None:
    """The GPU's name, if the table of GPUs has it with this much memory."""
    try:
        return gpus.lookup(facts.gpu, facts.total.nbytes if facts.total else None).name if facts.gpu else None
    except SnugvlError:
        return None


def plan_of(facts: RunFacts) -> Choice | None:
    """The planner's way to run the model of the log with vLLM on its GPU, or None."""
    machine, known = machine_of(facts), facts.known
    alone = not facts.command or facts.command.get("--tensor-parallel-size") in (None, "1")
    if machine is None or known is None or not known.as_published or not alone:
        return None
    limit = None
    if facts.free is None and facts.ceiling:  # nothing says that more than this is free
        limit = facts.ceiling.nbytes + budgets(machine)[0].device.context_bytes
    for wishes in _wishes(facts, limit):
        choice = _solved(facts, machine, wishes)
        surplus = _surplus(facts, choice) if choice else 0
        if choice and surplus > 0:
            (gpu,) = machine.gpus
            less = replace(machine, gpus=(replace(gpu, free_bytes=max(0, gpu.free_bytes - surplus)),))
            choice = _solved(facts, less, wishes)
            # What vLLM loads beyond the plan is inside its share of the card, not beside it.
            choice = replace(choice, budget=budgets(machine, limit)[0]) if choice else None
        if choice:
            return choice
    return None


def _solved(facts: RunFacts, machine: Machine, wishes: Wishes) -> Choice | None:
    assert facts.known is not None
    try:
        return solve([Candidate(facts.known.model.facts)], machine, wishes).choice
    except SnugvlError:
        return None


def _surplus(facts: RunFacts, choice: Choice) -> int:
    """Bytes that the run loaded beyond what the plan counts, such as a head that is loaded twice."""
    planned = choice.footprint.weights_bytes + choice.footprint.of(Kind.BUFFERS)
    return facts.weights.nbytes - planned if facts.weights else 0


def _wishes(facts: RunFacts, limit: int | None) -> Iterator[Wishes]:
    """Wishes to try in order: the command's, then without its context, then also without its pixels."""
    command = facts.command
    sees = bool(facts.known and facts.known.model.facts.vision)
    without = bool(command and command.has("--language-model-only"))
    images = _images_wished(facts) if sees and not without else 0
    asked = bool(command and (command.get("--kv-cache-dtype") or "").startswith("fp8"))
    # For keys without norm nothing is planned with it: bf16 is the larger.
    kv = asked and (facts.known is None or facts.known.model.qk_norm)
    given = command.get("--max-model-len") if command else None
    context = int(given) if given and given.isdigit() and len(given) < 10 else None
    for tokens, pixels in dict.fromkeys(
        ((context, max_pixels(facts)), (None, max_pixels(facts)), (None, None))
    ):
        try:
            yield Wishes(
                context=tokens or None, images=images, max_pixels=pixels, backend="vllm", memory_bytes=limit,
                language_only=without and sees, kv_cache="fp8" if kv else None,
            )  # fmt: skip
        except SnugvlError:
            continue


def _images_wished(facts: RunFacts) -> int:
    given = facts.command.get("--limit-mm-per-prompt") if facts.command else None
    match = re.search(r"image\W{1,4}(\d{1,3})", given or "")
    return min(int(match[1]), 16) if match else 1


def max_pixels(facts: RunFacts) -> int | None:
    """`max_pixels` of the command's --mm-processor-kwargs."""
    given = facts.command.get("--mm-processor-kwargs") if facts.command else None
    found = (json_object(given or "") or {}).get("max_pixels")
    return found if isinstance(found, int) and found > 0 else None


def safe_utilisation(facts: RunFacts) -> float | None:
    """The largest utilisation that the planner's budget allows; None where the log has no total."""
    machine = machine_of(facts)
    if machine is None:
        return None
    budget = budgets(machine)[0]
    room = budget.usable_bytes - budget.device.context_bytes
    return room * 10_000 // budget.total_bytes / 10_000 if room > 0 else None


def memory_changes(facts: RunFacts, choice: Choice | None) -> list[Change]:
    """The plan's flags, all at once, as they share the memory; without a plan, the context by vLLM's message."""
    if choice is None:
        longest = _by_message(facts)
        found = [Change("--max-model-len", None, str(longest), "what the KV cache holds")] if longest else []
        return found + utilisation_change(facts, choice)
    words, found = vllm_flags(choice), []
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        if not flag.startswith("--"):
            continue
        old = facts.command.get(flag) if facts.command else None
        if flag == "--gpu-memory-utilization":
            found += utilisation_change(facts, choice)
        elif flag not in _AT_MOST or not (old and old.isdigit() and int(old) <= int(value)):
            found.append(Change(flag, None, "" if value.startswith("--") else value, _why(choice, flag)))
    return found


def over_free_changes(facts: RunFacts, choice: Choice | None) -> list[Change]:
    """The change of utilisation alone where the plan has room to spare; otherwise all of the plan's."""
    if choice is None or not choice.settings.eager:
        return utilisation_change(facts, choice)
    return memory_changes(facts, choice)


def _why(choice: Choice, flag: str) -> str:
    settings = choice.settings
    return {
        "--max-model-len": f"{settings.context:,} tokens take {gib(choice.footprint.of(Kind.CACHE))} of KV cache",
        "--mm-processor-kwargs": f"images are scaled to {choice.tokens:,} tokens at most, and only that is profiled",
        "--limit-mm-per-prompt": "one image a request and no video: their profiles and caches are not reserved"
        if settings.images == 1
        else "no video: its profile and cache are not reserved",
        "--kv-cache-dtype": "a token takes half the bytes",
        "--enforce-eager": "there is no room for CUDA graphs",
    }.get(flag, "the plan counts the bytes of a step for this many")


def utilisation_change(facts: RunFacts, choice: Choice | None) -> list[Change]:
    """The change of --gpu-memory-utilization to the plan's, or to what the budget allows; empty for neither."""
    value = utilisation(choice) if choice else safe_utilisation(facts)
    if not (facts.free and facts.total) or not value or value == facts.utilisation:
        return []  # what others hold is not known, so nothing says that more is there
    if choice is None and value > (facts.utilisation or 0):
        return []  # by no computation does it need more of the card
    why = f"{gib(facts.free.nbytes)} of {gib(facts.total.nbytes)} were free; the rest is margin"
    return [Change("--gpu-memory-utilization", None, f"{value:g}", why)]


def _by_message(facts: RunFacts) -> int | None:
    """Tokens of the longest context by vLLM's own estimate, or by its count of KV tokens, rounded down a little."""
    for key, group in (("kv_short", 3), ("kv_short_tokens", 1)):
        if (hit := facts.run.last(key)) and hit.groups[group].isdigit() and len(hit.groups[group]) < 12:
            tokens = int(int(hit.groups[group]) * 0.97) // 256 * 256
            return tokens or None
    return None


def plan_command(facts: RunFacts) -> str:
    """`snugvl plan …` for the GPU of the log. It was solved before it is printed, so it finds a plan."""
    if not facts.total or facts.run.has("not_cuda"):
        return "snugvl plan"
    system, name = "wsl2" if facts.wsl2 else "linux", _gpu_name(facts)
    vram = f"{facts.total.nbytes // MIB}MiB"
    held = f"{max(facts.total.nbytes - facts.free.nbytes, 0) // MIB}MiB" if facts.free else None
    words = ["--gpu", name.lower().replace(" ", "-")] if name else []
    words += ["--vram", vram, *(("--held", held) if held else ()), "--os", system]
    known = facts.known
    try:
        machine = describe(name, vram=vram, held=held, os=system)
        wishes = Wishes(images=1 if known is None or known.model.facts.vision else 0)
        if known and solve([Candidate(known.model.facts)], machine, wishes).choice:
            return shlex.join(["snugvl", "plan", known.repo, *words])
        if solve(catalogue_candidates(), machine, Wishes()).choice:
            return shlex.join(["snugvl", "plan", *words])
    except SnugvlError:
        pass
    return "snugvl plan"
