"""The content of a report, as plain lines and rows; the renderers decide how it looks."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from snugvl.checkpoint.catalogue import find, published_as
from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import format_size, megapixels
from snugvl.hardware.machine import SYSTEMS, Machine
from snugvl.planner import costs
from snugvl.planner.budget import host_budget, ram_for, wsl_words
from snugvl.planner.capabilities import TORCH, older
from snugvl.planner.commands import beside_gpu_bytes, next_command, plain_command
from snugvl.planner.engines import rules_of
from snugvl.planner.engines.native.rules import parts_of
from snugvl.planner.engines.transformers.footprint import HOST_PROCESS_BYTES
from snugvl.planner.footprint.vision import pixels_for, scales
from snugvl.planner.footprint.weights import crossing_bytes, part_bytes
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.settings import Engine, Settings
from snugvl.planner.shortfall import by_reason, way_out, why_engine
from snugvl.planner.speed import ASSUMED_LINK, roofline, seconds, speed_text, tower_crossing_s
from snugvl.planner.wishes import Wishes

Measured = Callable[[Choice, str], int | None]  # (choice, component) → bytes measured on this machine

LONG_WAIT_S: Final = 10.0  # for the first token, that a person notices and asks what to do about it
QUICK_PIXELS: Final = 512 * 512
LOWER: Final = "its published scores are lower"
NAMED: Final = 3  # of many models that are refused alike


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One part of the memory bar. `measured_bytes`: bytes that an earlier run took; None where unknown."""

    label: str
    kind: Kind
    nbytes: int
    note: str = ""
    measured_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NextStep:
    """Commands for a shell, with a remark for people, which is not part of them."""

    remark: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a renderer needs."""

    headline: str
    fits: bool
    facts: tuple[tuple[str, str], ...]
    total_bytes: int
    used_bytes: int
    usable_bytes: int
    rows: tuple[MemoryRow, ...]
    steps: tuple[NextStep, ...]
    also: tuple[str, ...]
    why_not: tuple[str, ...]
    notes: tuple[str, ...]
    engines: tuple[str, ...] = ()
    plain_command: str | None = None
    figures: tuple[str, ...] = ()

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands of all steps."""
        return tuple(command for step in self.steps for command in step.commands)

    @property
    def memory(self) -> str:
        """A line that says how much memory is taken, or would be, of all that may be used."""
        used, usable = format_size(self.used_bytes), format_size(self.usable_bytes)
        return (
            f"Memory: {used} of {usable} that may be used"
            if self.fits
            else f"Memory: {used} would be needed; {usable} may be used"
        )


def report(plan: Plan, machine: Machine, measured: Measured | None = None, *, pull: bool = False) -> Report:
    """The report of a plan. `pull`: the model's files are not here yet."""
    shown = plan.choice or plan.closest
    return Report(
        headline=headline(plan, machine),
        fits=plan.choice is not None,
        facts=tuple(settings_facts(shown)) if shown else (),
        total_bytes=plan.budget.total_bytes,
        used_bytes=shown.footprint.total_bytes if shown else 0,
        usable_bytes=plan.budget.usable_bytes,
        rows=tuple(memory_rows(shown, measured)) if shown else (),
        steps=tuple(next_steps(plan, machine, pull=pull)),
        also=tuple(_also(choice, plan) for choice in plan.runners_up),
        why_not=tuple(why_not(plan)),
        notes=tuple(_notes(plan, machine)),
        plain_command=plain_command(plan.choice) if plan.choice else None,
        figures=tuple(costs.figures(plan.choice.option)) if plan.choice else (),
        engines=(
            (why_engine(plan), *(f"not {verdict.engine}: {verdict.text}" for verdict in plan.verdicts))
            if plan.choice
            else ()
        ),
    )


def headline(plan: Plan, machine: Machine) -> str:
    """The answer in one line."""
    there, shown = len(machine.gpus), plan.choice or plan.closest
    used = shown.settings.gpus if shown else 1
    many = f" × {used}" if used > 1 else f", one of {there}" if there > 1 else ""
    where = f"{plan.budget.name}{many} ({format_size(plan.budget.total_bytes)}{' each' if used > 1 else ''}, "
    where += f"{SYSTEMS[machine.os]})"
    if plan.choice is None:
        if plan.closest is None:
            if plan.instead is not None:
                return f"{where} runs GGUF files alone, by llama.cpp"
            if plan.cure is None:
                return f"nothing can run this on {where}"
            return f"{plan.cure.choice.option.model.name} doesn't run with {plan.cure.without} on {where}"
        short = plan.closest.footprint.total_bytes - plan.budget.usable_bytes
        return f"{plan.closest.option.model.name} does not fit {where}: {format_size(short)} too much"
    name, engine = plan.choice.option.model.name, rules_of(plan.choice.option.engine).title
    slow = _paced(plan.choice, ", at about", digits=1)
    only = f", only with layers in host memory{slow}" if plan.choice.option.offload else ""
    if experts := _experts(plan.choice):
        only = f", with {experts} in host memory{_paced(plan.choice, ', at about')}"
        ends = tuple(f"{rate:,.0f}" for rate in (plan.choice.speed.ddr or ("", 0.0, 0.0))[1:])
        if ends[0] != ends[1]:  # a core alone is slower than any kind
            only += f" ({ends[0]} to {ends[1]}, by the kind of host memory)"
    if only and plan.instead is not None:
        other = plan.instead
        same = other.option.model.name == name
        only += (
            f"; in {other.settings.weights} it fits whole"
            if same
            else f"; {other.option.model.name} fits whole"
        )
    return f"{name} fits {where}, with {engine}{only}"


def _experts(choice: Choice) -> str:
    """Experts that stay in host memory, where nothing else of the model does; else ""."""
    settings, layers = choice.settings, choice.option.model.facts.text.num_layers
    if not settings.host_experts or settings.offloaded or settings.vision == "cpu":
        return ""
    return f"the experts of {settings.host_experts} of {layers} layers"


def settings_facts(choice: Choice) -> list[tuple[str, str]]:
    """Label and value of each setting."""
    settings, model = choice.settings, choice.option.model
    facts = [("engine", rules_of(settings.engine).kind), ("weights", _weights(choice))]
    parts = "prompt, images and answer" if settings.images else "prompt and answer"
    context = f"{settings.context:,} tokens for {parts}, {settings.kv_name} cache"
    rules = rules_of(settings.engine)
    if rules.pooled and settings.kv_tokens > settings.context:
        many = settings.sequences > 1
        shared = f", which up to {settings.sequences} requests at once share" if many else ""
        context += f"; the whole cache has {settings.kv_tokens:,} tokens{shared}"
    facts.append(("context", context))
    if settings.images and model.facts.vision is not None:
        size = f", up to {megapixels(settings.max_pixels)}" if scales(model) and settings.max_pixels else ""
        facts.append(("images", f"{settings.images} a request{size} ({choice.tokens:,} tokens each)"))
    if settings.concurrency > 1:
        facts.append(("requests", f"{settings.concurrency} at the same time, each with its whole context"))
    if settings.gpus > 1:
        facts.append(("GPUs", _spread(settings)))
    if beside := rules.host_text(choice):
        facts.append(("host", beside))
    if crossing := crossing_bytes(model, settings):
        facts.append(("tower", f"{format_size(crossing)} of it stay in host memory; {_crossing(choice)}"))
    if settings.embedding == "cpu":
        held = f"{format_size(part_bytes(model, settings, 'embedding'))}, {settings.head}"
        facts.append(
            ("host", f"the embedding stays in host memory ({held}); the GPU reads a row for each token")
        )
    if settings.predictor:
        names = "weights: predictor", "predictor: hidden states"
        held = format_size(sum(choice.footprint.named(name) for name in names))
        drafting = f"the model's own predictor drafts tokens ({held}); --speculation off leaves it out"
        facts.append(("drafts", drafting))
    if speed := speed_text(choice.speed):
        facts.append(("speed", speed))
    return facts


def _spread(settings: Settings) -> str:
    parts = [
        (settings.data_parallel, "copies (data parallel)"),
        (settings.tensor_parallel, "share each layer (tensor parallel)"),
        (settings.pipeline_parallel, "hold groups of layers (pipeline parallel)"),
    ]
    return f"{settings.gpus}: " + ", ".join(f"{count} {what}" for count, what in parts if count > 1)


def _crossing(choice: Choice) -> str:
    """The text of a streamed tower's price: how long it takes for every picture."""
    gpu = choice.budget.gpu
    known = gpu is not None and gpu.link_bandwidth is not None
    rate = gpu.link_bandwidth if gpu is not None and gpu.link_bandwidth is not None else ASSUMED_LINK
    least = 1e3 * tower_crossing_s(choice.option.model, choice.settings, gpu)
    slot = f"at {rate / 1e9:.1f} GB/s{'' if known else ' (assumed)'}"
    return f"every picture waits at least {least:,.0f} ms for it to cross PCI Express {slot}"


def _weights(choice: Choice) -> str:
    if (gguf := choice.option.model.facts.gguf) is not None:
        return gguf.file_type
    stored, settings = choice.option.stored_quality, choice.settings
    weights = settings.weights_name
    if settings.head != "bf16":
        return f"{weights}, so that what is below fits"
    if stored != weights and stored == "fp8":
        return f"{weights}: this engine turns the FP8 file into {weights} while loading"
    if choice.budget.device.cpu and rules_of(settings.engine).own_layout and weights in ("fp32", "bf16"):
        return f"{weights} (on a processor bf16 and fp32 are equally quick: it computes in fp32)"
    return weights


def memory_rows(choice: Choice, measured: Measured | None = None) -> list[MemoryRow]:
    """Parts of the card's memory, from what others hold to what stays free; they sum up to its total."""
    budget, rows = choice.budget, []
    if budget.held_bytes:
        rows.append(MemoryRow(Kind.HELD.among, Kind.HELD, budget.held_bytes, _tenants(choice)))
    for part in choice.footprint.counted:
        found = measured(choice, part.name) if measured else None
        phase = "" if part.phase == "always" else f"only during {part.phase}"
        note = "; ".join(text for text in (part.why, phase) if text)
        rows.append(MemoryRow(part.name, part.kind.group, part.nbytes, note, found))
    if choice.spare_bytes > 0:
        note = rules_of(choice.option.engine).spare_note
        rows.append(MemoryRow(Kind.SPARE.among, Kind.SPARE, choice.spare_bytes, note))
    if budget.forbidden_bytes:
        rows.append(MemoryRow(Kind.LIMIT.value, Kind.LIMIT, budget.forbidden_bytes))
    margin = budget.margin_bytes - budget.forbidden_bytes
    note = f"{margin * 100 / max(budget.free_bytes, 1):.0f} % of what is free stays untouched"
    rows.append(MemoryRow(Kind.MARGIN.value, Kind.MARGIN, margin, note))
    return rows


def _tenants(choice: Choice) -> str:
    gpu = choice.budget.gpu
    if gpu is None or not gpu.tenants:
        return ""
    largest = sorted(gpu.tenants, key=lambda tenant: -tenant.held_bytes)[:3]
    return ", ".join(tenant.name for tenant in largest)


def _also(choice: Choice, plan: Plan) -> str:
    images = f", {choice.tokens:,}-token images" if choice.tokens and choice.settings.images else ""
    total = format_size(choice.footprint.total_bytes)
    larger = plan.choice is not None and choice.option.model.parameters > plan.choice.option.model.parameters
    lower = f"; {LOWER}" if larger and plan.choice and choice.quality < plan.choice.quality else ""
    return (
        f"{choice.option.title}: {choice.settings.context:,} tokens of context{images}, "
        f"{total} of memory{lower}"
    )


def _notes(plan: Plan, machine: Machine) -> list[str]:
    # What was assumed of system memory matters where a part of the model is in it.
    held = plan.choice.settings if plan.choice else None
    there = held and (held.embedding == "cpu" or held.vision == "streamed" or held.offloaded > 0)
    there = there or (held and (held.host_experts > 0 or held.expert_slots is not None))
    idle = machine.gpus and not there
    notes = [note for note in machine.notes if not (idle and note.startswith("System memory"))]
    if plan.changed:
        notes.append(f"{plan.changed[0].upper()}{plan.changed[1:]}.")
    if machine.spills:
        notes.append(
            "On this system what exceeds the card moves to system memory without an error and runs 2 to 10 "
            "times slower; the margin keeps away from that."
        )
    if plan.choice is not None:
        notes += _choice_notes(plan, plan.choice, machine)
    return notes


def _choice_notes(plan: Plan, choice: Choice, machine: Machine) -> list[str]:
    notes, settings, gguf = _llamacpp_notes(plan, choice), choice.settings, choice.option.model.facts.gguf
    notes += _host_notes(plan, choice, machine)
    if plan.held is choice:
        notes.append(f"{choice.option.model.name} is on this disk already: nothing is downloaded.")
    if gguf is not None and gguf.unlike:
        notes.append(gguf.unlike)
    if not (settings.images or settings.language_only) and choice.option.model.facts.vision is not None:
        freed = format_size(part_bytes(choice.option.model, choice.settings, "vision"))
        notes.append(f"No images are asked for; --language-only would also free the vision tower's {freed}.")
    if choice.settings.language_only:
        whole = choice.settings._replace(language_only=False)
        freed = format_size(part_bytes(choice.option.model, whole, "vision"))
        notes.append(
            f"Language only: without the vision tower {freed} of weights and the room for images are free; "
            "pictures are refused."
        )
    if choice.budget.device.pinned_bytes is not None and plan.wishes.embedding == "auto":
        notes += _could_leave(choice, plan.wishes)
    if plan.quicker is not None:
        notes.append(_much_quicker(plan.quicker, choice, plan.wishes))
    notes += _long_wait(choice, plan.wishes, machine)
    if plan.other_tower is not None:
        notes.append(_other_tower(plan.other_tower))
    notes += [*_to_install(plan, choice), *_idle(plan, choice, machine)]
    if choice.option.needs:
        notes.append(f"It needs {choice.option.needs}.")
    notes += costs.told(choice.option, choice.settings)
    return notes


def _llamacpp_notes(plan: Plan, choice: Choice) -> list[str]:
    """Notes on a GGUF that the plan chose by itself: its model, what it needs, and what runs without it."""
    facts, gpu = choice.option.model.facts, choice.budget.gpu
    if facts.gguf is None or facts.source != "catalogue":
        return []
    notes = [f"What it takes is computed from the model's shapes; snugvl plan {facts.name} reads its file."]
    if plan.named:
        least = "three" if facts.gguf.file_type.startswith("Q3") else "four"
        notes.insert(0, f"{facts.name} is {plan.named} with weights of {least} to six bits.")
    windows, nvidia = choice.budget.system == "windows", gpu is not None and gpu.api == "cuda"
    old = gpu is not None and older(gpu.compute_capability, TORCH)
    if choice.budget.device.cpu or (nvidia and (old or windows)):
        where = "In WSL2" if windows else "On a newer GPU"
        notes.append(f"{where} snugvl's other engines run, with every model and format.")
    return notes


def _host_notes(plan: Plan, choice: Choice, machine: Machine) -> list[str]:
    """Sentences on a mixture in host memory: the bytes that its experts take, and what else one could run, or
    one runs instead."""
    taken, notes = beside_gpu_bytes(choice), list[str]()
    torch = not rules_of(choice.option.engine).reads_only_gguf
    process = HOST_PROCESS_BYTES if torch else rules_of(choice.option.engine).process_bytes
    gpu = choice.budget.gpu
    if gpu is not None and not gpu.unified and machine.ram_free_bytes < process:
        notes.append(
            f"Host memory: {format_size(machine.ram_free_bytes)} are free, and the engine's process takes "
            f"about {format_size(process)} beside the GPU; where it gets no more, the system ends it."
        )
    if taken and _experts(choice):
        usable = format_size(host_budget(machine).usable_bytes)
        notes.append(
            f"Host memory: {format_size(taken)} of {usable} that may be used. The experts are pages of the "
            "file, not pinned: where other programs need that memory, they are read from the disk again, "
            "slowly."
        )
    alone = choice.budget.gpu is None and choice.option.model.mixed
    if plan.beside is not None and (alone or (taken and _experts(choice))):
        notes.append(_weighed(plan.beside, choice))
    if plan.roomier is not None:
        notes.append(_weighed(choice, plan.roomier))
    return notes


def _weighed(other: Choice, choice: Choice) -> str:
    """A sentence with speed and download of a mixture and of what would run without it, and which is better
    by which scores."""
    mine, facts = choice.option.model.facts, other.option.model.facts
    sizes = (format_size(each.download_bytes) for each in (mine, facts))
    kind = "" if facts.gguf is not None else f" in {other.settings.weights_name}"
    said = (
        f"{mine.name}{_paced(choice, ' gives about')} from {next(sizes)} of files, "
        f"{facts.name}{kind}{_paced(other, ' about')} from {next(sizes)}"
    )
    entry, known = published_as(mine.name), find(facts.name)
    if entry is None or (known and known[0] == entry):  # the one that was named, in other weights
        return f"{said}."
    by = "has the higher published scores" if entry.above is None else "ranks higher by its vendor's tables"
    return f"{said}; the first {by} (docs/plan.md)."


def _much_quicker(other: Choice, choice: Choice, wishes: Wishes) -> str:
    """A note that another engine answers sooner on a processor, at which speed, and what installs it."""
    rules, facts = rules_of(other.option.engine), other.option.model.facts
    speeds = (each.speed.decode_tokens_per_s for each in (other, choice))
    soon, late = (f"{each:.2g}" for each in speeds if each is not None)
    said = (
        f"On a processor {rules.title} answers sooner: {facts.name}, in weights of four to six bits, gives "
        f"about {soon} tokens/s instead of {late} (predicted). {rules.title} comes with {rules.wheel}"
    )
    return f"{said}; then {next_command(other, wishes)}" if published_as(facts.name) else f"{said}."


def _to_install(plan: Plan, choice: Choice) -> list[str]:
    """Notes on how to install the engine, and which other one runs the model without that."""
    rules = rules_of(choice.option.engine)
    if not rules.installed_by:
        return []
    ways = (each.option for each in plan.runners_up if each.option.model.name == choice.option.model.name)
    other = next((way.engine for way in ways if way.engine != choice.option.engine), None)
    instead = ""
    if other and plan.wishes.backend == "auto":
        command = rules_of(other).installed_by
        instead = f" Without it: --backend {other}{f', installed with {command}' if command else ''}."
    return [f"{rules.title} is installed with {rules.installed_by}.{instead}"]


def _idle(plan: Plan, choice: Choice, machine: Machine) -> list[str]:
    """Notes on why not all GPUs are used."""
    there, used = len(machine.gpus), choice.settings.gpus
    if there <= used or choice.budget.device.cpu:
        return []
    left = "The other GPU stays" if there == used + 1 else f"{there - used} GPUs stay"

    def shares(engine: Engine) -> bool:
        return len(rules_of(engine).spreads(choice.option.model, plan.wishes, there)) > 1

    engine = choice.option.engine
    why = f"{used} do as well" if shares(engine) else f"{rules_of(engine).title} runs on one"
    others = (
        f"; not {rules_of(verdict.engine).title}, which shares a model among several: {verdict.text}"
        for verdict in plan.verdicts
        if shares(verdict.engine)
    )
    return [f"{left} free: {why}{next(others, '')}."]


def _long_wait(choice: Choice, wishes: Wishes, machine: Machine) -> list[str]:
    """Notes on how to shorten the wait for the first token of a large picture, on a processor."""
    settings, model, waits = choice.settings, choice.option.model, choice.speed.first_token_s
    if not choice.budget.device.cpu or not settings.images or not scales(model):
        return []
    pixels = settings.max_pixels or 0
    fewer = max(QUICK_PIXELS, pixels_for(model, wishes.least_image_tokens))
    if waits is None or waits <= LONG_WAIT_S or pixels <= fewer:
        return []
    quick = roofline(model, settings._replace(max_pixels=fewer), choice.budget).first_token_s
    assert quick is not None
    wait = f"On a processor the answer about a picture of {megapixels(pixels)} begins after {waits:.0f} s at "
    if machine.others:  # less may fit a GPU that llama.cpp alone uses
        return [
            f"{wait}the earliest. Smaller pictures are quicker, show less detail and may fit the GPU; see "
            f"what becomes of it with --max-pixels {fewer}."
        ]
    return [
        f"{wait}the earliest. Smaller pictures are quicker and show less detail: with --max-pixels "
        f"{fewer} it begins after {quick:.0f} s at the earliest."
    ]


def _could_leave(choice: Choice, wishes: Wishes) -> list[str]:
    """Notes on an embedding that keeps the head in int8 and could be in host memory (`--embedding cpu`)."""
    settings, model = choice.settings, choice.option.model
    honours = rules_of(settings.engine).honours
    if "embedding" not in honours or settings.head == "bf16" or model.facts.tied:
        return []
    # What the solver would try then; the same parts with less on the GPU fit.
    tried = parts_of(model, choice.budget.device, wishes.tower, "cpu")
    if isinstance(tried, str) or replace(choice.option.parts, embedding="cpu") not in tried:
        return []
    freed = format_size(part_bytes(model, settings, "embedding"))
    return [
        f"--embedding cpu would free {freed} more: the GPU then "
        "reads the embedding from page-locked host memory. Of that this system gives "
        f"{format_size(choice.budget.device.pinned_bytes or 0)} at most, and at times less, so it is not "
        "done unasked."
    ]


def _other_tower(rival: Choice) -> str:
    streams = rival.option.streams
    where = "streamed (--tower streamed)" if streams else "on the GPU (--tower resident)"
    images = f" and images of {rival.tokens:,} tokens" if rival.settings.images else ""
    price = _crossing(rival) if streams else "no picture waits for it then"
    return (
        f"With its vision tower {where} {rival.option.model.name} fits in {rival.settings.weights_name} with "
        f"a context of {rival.settings.context:,} tokens{images}; {price}."
    )


def next_steps(plan: Plan, machine: Machine, *, pull: bool) -> Iterator[NextStep]:
    """Commands of a plan, the best first, with remarks. `pull`: the model's files aren't here yet."""
    steps = [*_ways(plan, machine, pull=pull)]
    if plan.held is not None and plan.held is not plan.choice:
        name = plan.held.option.model.name
        steps += _run(
            plan.held, plan.others, machine, f"On this disk already: {name}{_paced(plan.held, ', at about')}"
        )
    if plan.roomier is not None:
        steps += [NextStep(_with_more(plan.roomier, machine)), *_run(plan.roomier, plan.wishes, machine)]
    yield from dict.fromkeys(steps)  # what is to be installed is said once


def _with_more(choice: Choice, machine: Machine) -> str:
    """Sentences on what WSL2 runs with more of the PC's memory, and the lines that give it that."""
    needed = ram_for(beside_gpu_bytes(choice) or choice.footprint.total_bytes)
    has, pc = format_size(machine.ram_total_bytes), machine.pc_ram_bytes
    of = (
        f"{has} of the PC's {format_size(pc)}, half," if pc else f"{has}, by default half of the PC's memory,"
    )
    return (
        f"With {format_size(needed)} for WSL2 {choice.option.model.name} runs{_paced(choice, ', at about')}. "
        f"WSL2 has {of} unless .wslconfig says otherwise: {wsl_words(needed)}."
    )


def _ways(plan: Plan, machine: Machine, *, pull: bool) -> Iterator[NextStep]:
    """Commands of each way that a plan leads to."""
    choice = plan.choice
    if choice is None:
        if plan.cure is not None:
            title = f"Without {plan.cure.without} it fits"
            yield from _run(plan.cure.choice, plan.cure.wishes, machine, title)
        elif plan.closest is None and plan.instead is not None:
            yield _to_be_found(plan.instead)
        elif plan.closest is not None:
            yield NextStep(f"Way out: {way_out(plan)}.")
        return
    if choice.option.offload and plan.instead is not None:
        other = plan.instead
        whole = f"{other.option.model.name} in {other.settings.weights_name} fits whole"
        whole += _paced(other, " and runs at about")
        title = f"{choice.option.model.name}, as asked{_paced(choice, ', at about', digits=1)}"
        again = other.option.model.name == choice.option.model.name  # in another format: it is here by then
        asked = _run(choice, plan.wishes, machine, title, pull=pull and not again)
        ways = [_run(other, plan.others, machine, whole), asked]
        for way in reversed(ways) if _experts(choice) else ways:
            yield from way
        return
    if plan.instead is not None:
        yield _to_be_found(plan.instead)
    yield from _run(choice, plan.wishes, machine, pull=pull)
    if plan.ours is not None:
        wait = plan.ours.speed.first_token_s
        soon = f", first token after {seconds(wait)}" if wait else ""
        where = (
            f"By snugvl's own engine {plan.ours.option.model.name} runs, its experts in host memory as well"
        )
        title = f"{where}{_paced(plan.ours, ', at about')}{soon}"
        yield from _run(plan.ours, plan.wishes.apart(), machine, title)
    if plan.beside is not None:
        beside = plan.beside
        fast = _paced(beside, ", at about")
        on = "whole on the GPU" if beside.budget.gpu is not None else "on the processor"
        able = "Also by" if rules_of(beside.option.engine).reads_only_gguf else "Without"
        where = f"{able} llama.cpp {beside.option.model.name} runs {on}{fast}"
        yield from _run(beside, plan.wishes, machine, where)


def _to_be_found(choice: Choice) -> NextStep:
    """The step towards a GGUF whose name isn't known."""
    fast = _paced(choice, ", at about")
    return NextStep(
        f"On the GPU {choice.option.model.name} runs, by llama.cpp{fast}: look on the Hub for one that has "
        "its mmproj beside it, and plan it by its name, OWNER/NAME:Q4_K_M."
    )


def _paced(choice: Choice, how: str, *, digits: int = 0) -> str:
    """The text of its decoding speed, after the words `how`; empty where it isn't known."""
    rate = choice.speed.decode_tokens_per_s
    return f"{how} {rate:,.{digits}f} tokens/s" if rate else ""


def _llamacpp_step(choice: Choice) -> NextStep:
    """The step that comes before files that llama.cpp alone runs are fetched."""
    gpu, wheel = choice.budget.gpu, rules_of(choice.option.engine).wheel
    build = f"a llama-server in a build for {choice.budget.device.api} (docs/gguf.md says how)"
    what = wheel if gpu is None or gpu.api == "metal" else build
    return NextStep(f"llama.cpp runs it. Where it isn't installed yet, that comes first: {what}")


def _run(
    choice: Choice, wishes: Wishes, machine: Machine, title: str = "", *, pull: bool = True
) -> Iterator[NextStep]:
    """The steps to fetch a model, where it isn't here, and to run it."""
    facts = choice.option.model.facts
    command = next_command(choice, wishes)
    if not pull or facts.source in ("folder", "file"):
        yield NextStep(f"{title}:" if title else "", (command,))
        return
    if rules_of(choice.option.engine).reads_only_gguf:
        yield _llamacpp_step(choice)
    disk = "this disk" if machine.source == "probed" else "its disk"
    room = f"{format_size(machine.disk_free_bytes)} free on {disk}"
    if machine.source != "described" and machine.disk_free_bytes < facts.download_bytes:
        room = f"only {room}: make room, or set HF_HOME to another disk"
    elif machine.source != "probed":
        room = "that much disk is needed"
    size = f"{format_size(facts.download_bytes)} to download; {room}"
    title = f"{title} ({size}):" if title else f"{size}:"
    yield NextStep(title, (f"snugvl pull {shlex.quote(facts.name)}", command))


def why_not(plan: Plan) -> list[str]:
    """Lines on why not more, or why nothing fits, one a reason; those that a person can act on come first."""
    return [*_slower(plan), *_rejected(plan), *_refused(plan)]


def _slower(plan: Plan) -> Iterator[str]:
    """Lines on better models that fit, but answer too slowly to be recommended."""
    for choice in plan.slower:
        name = choice.option.model.name
        yield (
            f"{name} in {choice.settings.weights_name} also fits, and is better by its published scores, but "
            f"slower: {speed_text(choice.speed)}; snugvl plan {name} says more"
        )


def _rejected(plan: Plan) -> Iterator[str]:
    found: dict[str, list[str]] = {}  # models of one shape are refused alike
    for rejection in plan.rejections:
        found.setdefault(str(rejection).removeprefix(rejection.model), []).append(rejection.model)
    for line, models in found.items():
        yield f"{', '.join(filter(None, models))}{line}"


def _refused(plan: Plan) -> Iterator[str]:
    """Lines on engines that can't run a model here. `Report.engines` has the chosen model's; that llama.cpp
    needs a GGUF is mentioned only where nothing runs."""
    chosen = plan.choice
    told = []
    for refusal in plan.refusals:
        wants_gguf = rules_of(refusal.engine).reads_only_gguf
        left_out = chosen is not None and (refusal.model == chosen.option.model.name or wants_gguf)
        if not left_out and not (chosen is not None and rules_of(chosen.option.engine).reads_only_gguf):
            told.append(refusal)
    for reason, those, engines in sorted(by_reason(told), key=lambda each: "GGUF" in each[0]):
        yield f"{_listed(those)} with {' or '.join(rules_of(each).title for each in engines)}: {reason}"


def _listed(names: Sequence[str]) -> str:
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[: NAMED - 1])} and {len(names) - NAMED + 1} more models"
