"""What to type next: commands alone on their lines, and what is to be known of each above it."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from snugvl.core.sizes import format_size
from snugvl.hardware.machine import Machine
from snugvl.planner.commands import next_command
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.shortfall import way_out
from snugvl.planner.wishes import Wishes


@dataclass(frozen=True, slots=True)
class Step:
    """Commands, in a shell's words, and a remark in people's, which is no part of them."""

    remark: str
    commands: tuple[str, ...] = ()


def next_steps(plan: Plan, machine: Machine, *, pull: bool) -> Iterator[Step]:
    """What to do with a plan, the best first. `pull`: the model's files aren't here yet."""
    choice = plan.choice
    if choice is None:
        if plan.cure is not None:
            title = f"Without {plan.cure.without} it fits"
            yield from _run(plan.cure.choice, plan.cure.wishes, machine, title)
        elif plan.closest is None and plan.instead is not None:
            yield _to_be_found(plan.instead)
        elif plan.closest is not None:
            yield Step(f"Way out: {way_out(plan, plan.budget)}.")
        return
    if choice.option.offload and plan.instead is not None:
        other = plan.instead
        whole = f"{other.option.model.name} in {other.settings.weights_name} fits whole{_rate(other)}"
        yield from _run(other, plan.others, machine, whole)
        rate = choice.speed.decode_tokens_per_s
        slow = f", at about {rate:,.1f} tokens/s" if rate else ""
        title = f"{choice.option.model.name}, as asked{slow}"
        again = other.option.model.name == choice.option.model.name  # in another format: it is here by then
        yield from _run(choice, plan.wishes, machine, title, pull=pull and not again)
        return
    if plan.instead is not None:
        yield _to_be_found(plan.instead)
    yield from _run(choice, plan.wishes, machine, pull=pull)
    if plan.beside is not None:
        beside = plan.beside
        rate = beside.speed.decode_tokens_per_s
        fast = f", at up to {rate:,.0f} tokens/s" if rate else ""
        where = f"Without llama.cpp {beside.option.model.name} runs on the processor{fast}"
        yield from _run(beside, plan.wishes, machine, where)


def _to_be_found(choice: Choice) -> Step:
    """What is to be done for a GGUF of which no name is known."""
    rate = choice.speed.decode_tokens_per_s
    fast = f", at about {rate:,.0f} tokens/s" if rate else ""
    return Step(
        f"On the GPU {choice.option.model.name} runs, by llama.cpp{fast}: look on the Hub for one that has "
        "its mmproj beside it, and plan it by its name, OWNER/NAME:Q4_K_M."
    )


def _rate(choice: Choice) -> str:
    speed = choice.speed.decode_tokens_per_s
    return f" and runs at up to {speed:,.0f} tokens/s" if speed else ""


def _run(
    choice: Choice, wishes: Wishes, machine: Machine, title: str = "", *, pull: bool = True
) -> Iterator[Step]:
    """To fetch a model, where it isn't here, and to run it."""
    facts = choice.option.model.facts
    command = next_command(choice, wishes)
    if not pull or facts.source in ("folder", "file"):
        yield Step(f"{title}:" if title else "", (command,))
        return
    room = f"{format_size(machine.disk_free_bytes)} free on this disk"
    if machine.source != "probed":
        room = "that much disk is needed"
    elif machine.disk_free_bytes < facts.download_bytes:
        room = f"only {room}: make room, or set HF_HOME to another disk"
    size = f"{format_size(facts.download_bytes)} to download; {room}"
    title = f"{title} ({size}):" if title else f"{size}:"
    yield Step(title, (f"snugvl pull {shlex.quote(facts.name)}", command))
