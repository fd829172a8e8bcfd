"""Random machines × wishes: what `snugvl plan` prints is followed, and must hold.

    python -m tests.planner.random_plans [--cases 10000] [--seed 0] [--show 10]

Each case is a command line of `snugvl plan`, run through the real parser in this process. Of what it prints:

    remedy       every remedy is followed (its options or its machine), and gives a plan
    command      the next command, parsed by the real parser, plans the same settings in the same memory; so
                 does `snugvl serve --plan` with the saved plan
    engine       no plan is made for a machine where its engine doesn't run
    more         more GPU memory, more RAM or one more GPU never takes a plan away, never gives fewer bits
                 *and* less speed (of weights, where the cache has no more), never less speed for nothing, and
                 never smaller images or a shorter context in the same format (but where layers come back from
                 host memory, which was a last resort; or where a GPU makes it several times as fast), nor a
                 model of lower
                 rank, unless several times as fast, or with no smaller images in a longer context and half as
                 fast at least: those are what the issue names, ranks aren't
    text         no figure that nobody can act on, no line twice; commands stand alone on their lines

The words here are this file's own: the solver's score isn't asked. Prints counts, and the first violations
of each kind as command lines that repeat them. Exit code 1 where there is one.
"""

import argparse
import json
import random
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import typer.main

from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.read import facts_of
from snugvl.cli import app, serve, serve_plan, session
from snugvl.cli import plan as plan_command
from snugvl.cli import serve as serve_command
from snugvl.core.sizes import GIB, MIB, parse_size
from snugvl.errors import SnugvlError
from snugvl.hardware.machine import Machine
from snugvl.loading import backend_for
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.report.document import document
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.speed import roofline
from snugvl.planner.wishes import wishes_of

MODELS: Final = (
    "pocket", "Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-2B-Instruct-FP8", "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-8B-Instruct-FP8", "Qwen/Qwen3-VL-32B-Instruct",
    "Qwen/Qwen3-VL-32B-Instruct-FP8", "Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct",
    "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-2B", "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B", "google/gemma-3-4b-it", "google/gemma-3-12b-it",
    "OpenGVLab/InternVL3-2B-hf", "HuggingFaceTB/SmolVLM-256M-Instruct", "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-8B", "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.5-35B-A3B-FP8", "Qwen/Qwen3.5-35B-A3B-GPTQ-Int4",
    "ggml-org/Qwen3.6-35B-A3B-GGUF:Q4_K_M", "Qwen/Qwen3.5-122B-A10B",
    "meta-llama/Llama-3.1-8B-Instruct", "microsoft/Phi-4-mini-instruct", "mistralai/Mistral-7B-Instruct-v0.3",
)  # fmt: skip
GGUFS: Final = (
    "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "Qwen/Qwen3-8B",
)
NVIDIA: Final = (
    "gtx-1650", "gtx-1060", "rtx-2060", "rtx-2080-ti", "rtx-3050", "rtx-3060", "rtx-3080", "rtx-3090",
    "rtx-4060", "rtx-4070", "rtx-4090", "rtx-5060", "rtx-5090", "t4", "l4", "l40s", "v100", "a100",
    "h100", "h200",
)  # fmt: skip
OTHERS: Final = ("rx-7900-xtx", "rx-7600", "rx-9070-xt", "arc-a770", "arc-b580", "mi300x")
APPLE: Final = ("m1", "m2-max", "m3-ultra", "m4", "m4-max")
BITS: Final = {"fp32": 16.0, "bf16": 16.0, "fp8": 8.5, "int8": 8.0, "int6": 6.0, "int5": 5.0, "int4": 4.0}
CACHE_BITS: Final = {"fp8": 8.0, "q8_0": 8.5, "bf16": 16.0, "f16": 16.0, "fp32": 32.0}
SLOWER: Final = 0.97  # what counts as less speed
RESERVED: Final = "driver (reserved)"
WSL_SHARE: Final = 2  # `--ram` is the PC's, of which WSL2 has half


@dataclass(frozen=True)
class Case:
    """The words of one `snugvl plan`: a model or none, options of the machine, and wishes."""

    model: str | None
    machine: tuple[tuple[str, str], ...]
    wishes: tuple[tuple[str, str], ...]

    @property
    def words(self) -> list[str]:
        """As typed, behind `snugvl`."""
        options = [word for pair in (*self.machine, *self.wishes) for word in pair if word]
        return ["plan", *([self.model] if self.model else []), *options, "--offline"]

    def on(self, **changed: str) -> "Case":
        """With another machine."""
        return replace(
            self, machine=tuple(({**dict(self.machine), **{f"--{k}": v for k, v in changed.items()}}).items())
        )

    def wishing(self, words: Sequence[str]) -> "Case":
        """With options changed."""
        pairs = {words[n]: words[n + 1] for n in range(0, len(words), 2)}
        return replace(self, wishes=tuple(({**dict(self.wishes), **pairs}).items()))


class Captured(BaseException):
    """What a command was about to do."""


@cache
def facts(model: str) -> ModelFacts:
    """Read once."""
    return facts_of(model, offline=True)


def ggufs(folder: Path, names: Sequence[str] = GGUFS) -> tuple[str, ...]:
    """Files of the exact shapes, without weights."""
    from training.gguf_export import export

    paths = [folder / f"{name.rpartition('/')[2]}-Q4_K_M.gguf" for name in names]
    for name, path in zip(names, paths, strict=True):
        if not path.exists():
            export(name, path, "Q4_K_M", words=1)
    return tuple(map(str, paths))


def random_machine(pick: random.Random) -> tuple[tuple[str, str], ...]:
    """Options that describe one; now and then one that can't be."""
    kind = pick.choices(["nvidia", "vram", "none", "other", "apple"], [50, 15, 15, 12, 8])[0]
    words: dict[str, str] = {}
    if kind == "none":
        words |= {"--gpu": "none"}
    elif kind == "vram":
        words |= {"--vram": f"{pick.choice([2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 80])}GiB"}
    else:
        words |= {"--gpu": pick.choice({"nvidia": NVIDIA, "other": OTHERS, "apple": APPLE}[kind])}
    if kind == "apple":
        words |= {"--os": "macos"} if pick.random() < 0.7 else {}
    elif pick.random() < 0.4:
        words |= {
            "--os": pick.choices(["linux", "wsl2", "windows", "macos", "other"], [20, 45, 20, 10, 5])[0]
        }
    if kind != "none" and pick.random() < 0.4:
        words |= {"--held": f"{pick.choice([0, 300, 951, 2000, 4000])}MiB"}
    if kind in ("nvidia", "vram") and pick.random() < 0.3:
        words |= {"--gpus": str(pick.choice([1, 2, 2, 3, 4, 8]))}
    if pick.random() < 0.6 or kind in ("none", "apple"):
        words |= {"--ram": f"{pick.choice([2, 4, 8, 12, 16, 17, 24, 32, 48, 64, 128, 256])}GiB"}
        if pick.random() < 0.3:
            words |= {"--ddr": pick.choice(["DDR4-2666", "DDR4-3200", "DDR5-6000"])}
    return tuple(words.items())


def random_wishes(pick: random.Random, *, sees: bool) -> tuple[tuple[str, str], ...]:
    """Some options, mostly few."""
    every: list[tuple[str, Sequence[str], float]] = [
        ("--context", ["1024", "4096", "8192", "32768", "131072"], 0.2),
        ("--images", ["0", "1", "2", "4"] if sees else ["0"], 0.1 if sees else 0.9),
        ("--max-pixels", ["262144", "1048576", "4194304"], 0.1 if sees else 0.0),
        ("--min-image-tokens", ["256", "1024", "4096"], 0.05 if sees else 0.0),
        ("--for", ["chat", "documents", "detect", "batch"] if sees else ["chat", "batch"], 0.3),
        ("--task", ["scene", "ask", "detect"], 0.06 if sees else 0.0),
        ("--quality", ["int4", "int6", "int8", "fp8", "bf16"], 0.12),
        ("--weights", ["bf16", "fp8", "int8", "int6", "int5", "int4"], 0.15),
        ("--backend", ["native", "transformers", "vllm", "llamacpp"], 0.25),
        ("--kv-cache", ["bf16", "fp8"], 0.12),
        ("--memory", ["2GiB", "4GiB", "7200MiB", "20GiB", "3.3GiB", "777777777B"], 0.2),
        ("--concurrency", ["2", "4", "16", "64"], 0.15),
        ("--speculation", ["ngram", "mtp", "auto"], 0.15),
        ("--tower", ["resident", "streamed"], 0.06 if sees else 0.0),
        ("--embedding", ["gpu", "cpu"], 0.06),
    ]
    chosen = [(name, pick.choice(values)) for name, values, share in every if pick.random() < share * 0.8]
    if sees and pick.random() < 0.04 and not {"--images", "--task"} & dict(chosen).keys():
        chosen.append(("--language-only", ""))
    return tuple(chosen)


def random_case(pick: random.Random, files: Sequence[str]) -> Case:
    """A model, or one time in thirty the whole catalogue; a machine; wishes."""
    kind = pick.random()
    model = None if kind < 0.03 else pick.choice(files) if files and kind < 0.25 else pick.choice(MODELS)
    return Case(
        model,
        random_machine(pick),
        random_wishes(pick, sees=model is None or facts(model).vision is not None),
    )


@dataclass(frozen=True)
class Outcome:
    """What a `snugvl plan` came to: a plan for a machine, or an exit code and what was said."""

    code: int
    plan: Plan | None = None
    machine: Machine | None = None
    said: str = ""

    @property
    def choice(self) -> Choice | None:
        """What would run."""
        return self.plan.choice if self.plan else None


def planned(case: Case) -> Outcome:
    """The command, run up to what it would print."""
    seen: list[Any] = []
    said: list[str] = []
    known = plan_command._candidates

    def candidates(model: str | None, offline: bool, sees: bool) -> list[Candidate]:
        return known(model, offline, sees) if model is None else [Candidate(facts(model))]

    with (
        mock.patch.object(plan_command, "_candidates", candidates),
        mock.patch.object(plan_command, "_put", lambda plan, machine, **_: seen.extend((plan, machine))),
        mock.patch.object(app, "say", said.append),
    ):
        code = app.run(case.words)
    plan, machine = seen or (None, None)
    return Outcome(code, plan, machine, " ".join(said))


def followed_command(words: Sequence[str], outcome: Outcome) -> tuple[Settings, str, int | None]:
    """Settings, model and memory limit of a printed command on the same machine.

    Raises:
        ValueError: it is refused.
    """
    assert outcome.machine is not None
    machine = outcome.machine
    caught: list[Any] = []
    said: list[str] = []

    def stop(*values: Any) -> Any:
        caught.append(values[0])
        raise Captured

    with (
        mock.patch.object(serve_command.Serving, "run", stop),
        mock.patch.object(session, "resolve", stop),
        mock.patch.object(app, "say", said.append),
        tempfile.NamedTemporaryFile(suffix=".png") as picture,
    ):
        real = [picture.name if re.fullmatch(r"IMAGE\d*", word) else word for word in words[1:]]
        try:
            code = app.run(real)
        except Captured:
            code = 0
    if code or not caught:
        raise ValueError(f"exit {code}: {' '.join(said)}")
    if isinstance(caught[0], serve_command.Serving):
        return served(caught[0], machine)
    load = replace(caught[0].load, model=caught[0].model)
    backend = backend_for(load) if Path(load.model).exists() or load.model == "pocket" else load.backend
    model = facts(load.model)
    wishes = serve_plan_wishes(load, model, "native" if backend == "auto" and model.native else backend)
    choice = solve([Candidate(model)], serve_plan.on_device(load.device, machine), wishes).choice
    if choice is None:
        raise ValueError("no plan any more")
    return choice.settings, model.name, wishes.memory_bytes


def serve_plan_wishes(load: Any, model: ModelFacts, backend: Any) -> Any:
    """The wishes of a task's command, as `backends.native.allocation.choose` makes them."""
    return wishes_of(load, sees=model.vision is not None, backend=backend)


def served(serving: Any, machine: Machine) -> tuple[Settings, str, int | None]:
    """What `snugvl serve` plans on this machine, with every engine installed."""
    seen: Future[Machine] = Future()
    seen.set_result(machine)
    with (
        mock.patch.object(serve_plan, "_named", lambda model: Candidate(facts(model))),
        mock.patch.object(serve_plan, "_missing", return_value={}),
        mock.patch.object(serve_plan, "_finds_llamacpp", return_value=True),
    ):
        try:
            load, kept = serving.asked()
            found = serve_plan.plan_for(load, serving.child, seen, kept)
        except SnugvlError as error:
            raise ValueError(str(error)) from None
    assert isinstance(found, serve_plan.Planned)
    serve.check_engine(serving.load, serving.child, found.engine, found.why)
    return found.choice.settings, found.name, found.asked.memory_bytes


# The checks. Each yields (kind, what is wrong).

Violation = tuple[str, str]


def check_command(case: Case, outcome: Outcome, folder: Path) -> Iterator[Violation]:
    """What is printed to type next plans the same; so does the saved plan."""
    choice, plan = outcome.choice, outcome.plan
    if choice is None or plan is None or outcome.machine is None:
        return
    yield from check_steps(plan, outcome)
    document_ = document(plan, outcome.machine)
    path = folder / "plan.json"
    path.write_text(json.dumps(document_), encoding="utf-8")
    limit = plan.wishes.memory_bytes
    saved = ["snugvl", "serve", "--plan", str(path)]
    for kind, words in (("command", shlex.split(document_["command"])), ("saved plan", saved)):
        try:
            settings, model, memory = followed_command(words, outcome)
        except (ValueError, Exception) as error:
            yield kind, f"{shlex.join(words)} fails: {error!r}"[:300]
            continue
        if model != choice.option.model.name or memory != limit:
            yield (
                kind,
                f"{shlex.join(words)} plans {model} in {memory}, not {choice.option.model.name} in {limit}",
            )
        elif settings != choice.settings:
            differs = [
                f"{name} {getattr(choice.settings, name)} → {getattr(settings, name)}"
                for name in Settings._fields
                if getattr(choice.settings, name) != getattr(settings, name)
            ]
            yield kind, f"{shlex.join(words)} plans otherwise: {', '.join(differs)}"


def check_steps(plan: Plan, outcome: Outcome) -> Iterator[Violation]:
    """Everything that is printed under "Next" runs, also what is said beside the plan's own command."""
    assert outcome.machine is not None
    meant = [plan.choice, plan.instead, plan.beside, plan.cure.choice if plan.cure else None, plan.roomier]
    meant += [plan.ours, plan.held]
    known: dict[str, list[Settings]] = {}
    for each in filter(None, meant):
        known.setdefault(each.option.model.name, []).append(each.settings)
    for step in report(plan, outcome.machine, pull=True).steps:
        if found := FOR_WSL.match(step.remark):
            outcome = replace(outcome, machine=given_memory(outcome.machine, float(found["size"])))
        for command in step.commands:
            yield from _follow_step(command, known, outcome)


def _follow_step(command: str, known: dict[str, list[Settings]], outcome: Outcome) -> Iterator[Violation]:
    words = shlex.split(command)
    if words[:2] == ["snugvl", "pull"]:
        if len(words) != 3 or words[2] not in known:
            yield "command", f"{command} pulls what nobody planned"
        return
    try:
        settings, model, _ = followed_command(words, outcome)
    except (ValueError, Exception) as error:
        yield "command", f"{command} fails: {error!r}"[:300]
        return
    if settings not in known.get(model, ()):
        yield "command", f"{command} plans otherwise than was said of {model}"


FOR_WSL: Final = re.compile(r"With (?P<size>[\d.]+) GiB for WSL2 ")


def given_memory(machine: Machine, size_gib: float) -> Machine:
    """The machine with so much host memory, of which as much is held as before."""
    more = round(size_gib * GIB) - machine.ram_total_bytes
    return replace(
        machine, ram_total_bytes=machine.ram_total_bytes + more, ram_free_bytes=machine.ram_free_bytes + more
    )


REMEDY: Final = re.compile(
    r"it fits (?:with (?P<words>--\S+ \S+)|when other programs give (?P<size>[\d,.]+ \w+) back)"
)
HOST: Final = re.compile(
    r"(?:as (?P<model>\S+) )?it fits with (?P<size>[\d.]+) GiB of host memory(?P<wsl> for WSL2)?"
)
INSTEAD: Final = re.compile(r"^(?P<model>\S+) fits, in ")
BIGGER: Final = "with more memory"


def check_remedies(case: Case, outcome: Outcome) -> Iterator[Violation]:
    """Every remedy is followed."""
    plan = outcome.plan
    if plan is None or outcome.machine is None:
        return
    yield from check_notes(case, outcome, plan)
    remedies: list[tuple[str | None, str]] = [
        (each.text.split()[0], each.remedy) for each in plan.rejections if each.remedy
    ]
    if plan.choice is None and plan.closest is not None:
        text = plain(report(plan, outcome.machine))
        remedies += [(case.model, said.removesuffix(".")) for said in re.findall(r"Way out: (.*)", text)]
    for model, text in remedies:
        yield from _follow(replace(case, model=case.model or model), outcome, text)


TOWER: Final = re.compile(
    r"\(--tower (?P<place>\w+)\) \S+ fits in (?P<weights>.+) with a context of (?P<context>[\d,]+) tokens"
    r"(?: and images of (?P<tokens>[\d,]+) tokens)?;"
)
SMALLER: Final = re.compile(r"with (?P<words>--max-pixels \d+) it begins after (?P<wait>\d+) s")


SERVED: Final = re.compile(r"snugvl serve .*")


def check_notes(case: Case, outcome: Outcome, plan: Plan) -> Iterator[Violation]:
    """What notes promise of another option, and better models that are said to fit."""
    assert outcome.machine is not None
    for note in report(plan, outcome.machine, pull=True).notes:
        if found := TOWER.search(note):
            model = outcome.choice.option.model.name if outcome.choice else None
            after = planned(
                replace(case, model=case.model or model).wishing(["--tower", found["place"]])
            ).choice
            had = (
                (after.settings.weights_name, f"{after.settings.context:,}", f"{after.tokens:,}")
                if after
                else None
            )
            if had != (found["weights"], found["context"], found["tokens"] or "0"):
                yield "remedy", f"{note}: {had}"
        if (
            note.startswith("--embedding cpu")
            and planned(case.wishing(["--embedding", "cpu"])).choice is None
        ):
            yield "remedy", f"{note}: no plan then"
        if found := SMALLER.search(note):
            model = outcome.choice.option.model.name if outcome.choice else None
            after = planned(replace(case, model=case.model or model).wishing(found["words"].split())).choice
            wait = after.speed.first_token_s if after else None
            if wait is None or abs(wait - float(found["wait"])) > 1:
                yield "remedy", f"{note}: {wait}"
        if "answers sooner" in note and (found := SERVED.search(note)):
            settings, model, _ = followed_command(shlex.split(found[0]), outcome)
            quicker = plan.quicker
            if quicker is None or (settings, model) != (quicker.settings, quicker.option.model.name):
                yield "remedy", f"{note}: {model} in {settings}"
    for slower in plan.slower:
        after = planned(replace(case, model=slower.option.model.name)).choice
        if after is None or after.settings != slower.settings:
            yield "remedy", f"{slower.option.model.name} is said to fit: {after and after.settings}"


def _follow(case: Case, outcome: Outcome, text: str) -> Iterator[Violation]:
    assert outcome.machine is not None
    if found := HOST.search(text):
        ram = parse_size(f"{found['size']}GiB") * (WSL_SHARE if found["wsl"] else 1)
        larger = replace(case, model=found["model"] or case.model).on(ram=f"{ram}B")
        if planned(larger).choice is None:
            yield "remedy", f"{text}: no plan then"
    elif found := REMEDY.search(text):
        if found["words"]:
            after = planned(case.wishing(found["words"].rstrip(",;").split()))
        else:
            given = parse_size(found["size"].replace(",", "").replace(" ", ""))
            lent = held_by_programs(outcome.machine)
            if given > lent:
                yield "remedy", f"{text}: programs hold {lent / MIB:.0f} MiB"
                return
            after = planned(given_back(case, outcome.machine, given))
        if after.choice is None:
            yield "remedy", f"{text}: no plan then ({after.said})"
    elif instead := INSTEAD.search(text):
        if planned(replace(case, model=instead["model"])).choice is None:
            yield "remedy", f"{text}: no plan then"
    elif BIGGER in text and "GPU" in text:
        case = without_limit(case, text)
        if planned(case.on(vram="2TiB", held="0MiB", ram="4TiB")).choice is None:
            yield "remedy", f"{text}: not even with 2 TiB"
    elif BIGGER in text:
        case = without_limit(case, text)
        larger = case.on(ram="4TiB", **({"vram": "2TiB"} if machine_has_card(case) else {}))
        if planned(larger).choice is None:
            yield "remedy", f"{text}: not even with 4 TiB"
    elif "give" in text and "back" in text:
        yield "remedy", f"{text}: says of no program what to give"


def machine_has_card(case: Case) -> bool:
    """Whether a GPU with memory of its own was described."""
    name = dict(case.machine).get("--gpu")
    return name is not None and name not in ("none", *APPLE)


def without_limit(case: Case, text: str) -> Case:
    """Without `--memory`, where the remedy says so."""
    kept = tuple(
        (name, value) for name, value in case.wishes if name != "--memory" or "no --memory" not in text
    )
    return replace(case, wishes=kept)


def held_by_programs(machine: Machine) -> int:
    """What can be given back on each GPU: the driver's own part can't."""
    gpu = machine.gpus[0] if machine.gpus else machine.others[0] if machine.others else None
    if gpu is None:
        return max(machine.ram_total_bytes - machine.ram_free_bytes - 2 * GIB, 0)
    return sum(tenant.held_bytes for tenant in gpu.tenants if tenant.name != RESERVED)


def given_back(case: Case, machine: Machine, given: int) -> Case:
    """The same machine where others hold less."""
    return case.on(held=f"{max(held_by_programs(machine) - given, 0)}B")


def check_engine(case: Case, outcome: Outcome) -> Iterator[Violation]:
    """Whether the engine of the plan runs there at all, said without the planner."""
    choice, machine = outcome.choice, outcome.machine
    if choice is None or machine is None:
        return
    engine, gpu, system = choice.option.engine, choice.budget.gpu, machine.os
    why = ""
    if engine in ("native", "vllm", "transformers"):
        if system == "windows":
            why = "it doesn't run on Windows"
        elif gpu is not None and gpu.api != "cuda":
            why = f"it has nothing for {gpu.api}"
        elif gpu is not None and system == "macos":
            why = "macOS has no CUDA"
        elif gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < (7, 5):
            why = f"the card is of {gpu.compute_capability}"
    if engine == "vllm" and (gpu is None or system not in ("linux", "wsl2")):
        why = f"no GPU, or {system}"
    if engine == "llamacpp" and choice.option.model.facts.gguf is None:
        why = "it reads GGUF alone"
    if gpu is not None and gpu.api == "cuda" and system == "macos":
        why = "no Mac has CUDA"
    gone = engine != "llamacpp" and choice.settings.kv == "fp8" and not choice.option.model.qk_norm
    if gone:
        why = "an FP8 cache of keys without norm"
    mixed = any(tensor.role == "expert" for tensor in choice.option.model.facts.tensors)
    if engine == "transformers" and choice.option.made and mixed:
        why = "bitsandbytes leaves experts as they are"
    if why:
        yield "engine", f"{engine} on {gpu.name if gpu else 'the processor'} ({system}): {why}"


def more_of(case: Case, outcome: Outcome, pick: random.Random) -> Iterator[tuple[str, Case]]:
    """The machine with more of each thing in turn."""
    machine, given = outcome.machine, dict(case.machine)
    assert machine is not None
    cards = machine.gpus or tuple(gpu for gpu in machine.others if not gpu.unified)
    # What is assumed of programs grows with a card, where something is.
    if cards and ("--held" in given or not machine.spills):
        more = cards[0].total_bytes + pick.choice([300 * MIB, GIB, 4 * GIB, 16 * GIB])
        yield "VRAM", case.on(vram=f"{more}B")
    whole = machine.ram_total_bytes * (WSL_SHARE if machine.os == "wsl2" else 1)
    ram = (machine.pc_ram_bytes or whole) + pick.choice([GIB // 2, GIB, 4 * GIB, 32 * GIB])
    yield "RAM", case.on(ram=f"{ram}B")
    if machine.gpus and len(machine.gpus) < 8:
        yield "one more GPU", case.on(gpus=str(len(machine.gpus) + 1))


def check_more(case: Case, outcome: Outcome, pick: random.Random) -> Iterator[Violation]:
    """More is never worse, in the words that people have for it."""
    before = outcome.choice
    if before is None:
        return
    for what, bigger in more_of(case, outcome, pick):
        plan = planned(bigger).plan
        after = plan.choice if plan else None
        if plan is None or after is None:
            yield "more", f"{what}: no plan any more ({shlex.join(bigger.words)})"
        elif after.option.model.name == before.option.model.name or case.model is not None:
            if worse := _worse(before, after):
                yield "more", f"{what}: {worse} ({shlex.join(bigger.words)})"
        elif rank(after) < rank(before) and not (
            _far_quicker(before, after) or _better_in_all(before, after)
        ):
            yield "more", f"{what}: {after.option.model.name} instead of {before.option.model.name}"


def rank(choice: Choice) -> int:
    """The model's place in the catalogue."""
    from snugvl.checkpoint.catalogue import find, published_as

    found = find(choice.option.model.name)
    entry = found[0] if found else published_as(choice.option.model.name)
    return -(entry.quality_rank or 999) if entry else -999


FAR: Final = 3.0  # times as fast: what a card gives that a processor doesn't


def _far_quicker(before: Choice, after: Choice) -> bool:
    was, now = (each.speed.decode_tokens_per_s for each in (before, after))
    return was is not None and now is not None and now >= FAR * was


def _better_in_all(before: Choice, after: Choice) -> bool:
    """Whether a model has no smaller images, a longer context for each request, and is half as fast at least:
    with 64 at once the better one had 1,536 tokens and thumbnails where this one has full HD."""
    was, now = (each.speed.decode_tokens_per_s for each in (before, after))
    slower = was is not None and now is not None and now < was / 2
    wider = after.tokens >= before.tokens and after.settings.context > before.settings.context
    return wider and not slower


def _worse(before: Choice, after: Choice) -> str:
    bits, more = BITS[before.option.stored_quality], BITS[after.option.stored_quality]
    bits, more = min(bits, BITS[before.settings.weights]), min(more, BITS[after.settings.weights])
    context = min(before.settings.context, after.settings.context)
    was, now = (speed(each, context) for each in (before, after))
    slower = was is not None and now is not None and now < SLOWER * was
    gained = any(after_ > before_ for before_, after_ in zip(gains(before), gains(after), strict=True))
    gained = gained or 0 < file_bits(before) < file_bits(after)  # Q4_K_M after Q3_K_M: both count as int4
    finer_cache = CACHE_BITS[after.settings.kv_name] > CACHE_BITS[before.settings.kv_name]
    if slower and ((more < bits and not finer_cache) or (more == bits and not gained)):
        return f"{more:g} bits at {now:.1f} tokens/s instead of {bits:g} at {was:.1f}"
    back = before.option.offload and not after.option.offload  # from the last resort, many times slower
    exempt = back or _far_quicker(before, after)  # a GPU instead of the processor
    if before.settings.weights_name == after.settings.weights_name and not exempt:
        if after.settings.context < before.settings.context:
            return f"a context of {after.settings.context} instead of {before.settings.context}"
        if after.tokens < before.tokens:
            return f"images of {after.tokens} tokens instead of {before.tokens}"
    return ""


def file_bits(choice: Choice) -> int:
    """Bits that a GGUF's file type names; 0 for other models."""
    gguf = choice.option.model.facts.gguf
    digits = re.search(r"\d", gguf.file_type) if gguf is not None else None
    return int(digits[0]) if digits else 0


def gains(choice: Choice) -> tuple[float, ...]:
    """What a person may have for less speed: a longer context, larger images, more requests at once, a finer
    cache or finer weights beside the layers', GPUs that stay free for something else."""
    settings = choice.settings
    cache = CACHE_BITS[settings.kv_name]
    parts = [float(each) for each in (settings.head == "bf16", settings.vision_weights == "bf16")]
    parts.append(float(settings.vision != "cpu"))  # where a picture takes minutes
    parts.append(float(settings.data_parallel))  # whole copies don't wait for one another at every layer
    return settings.context, choice.tokens, settings.sequences, cache, *parts, -settings.gpus


def speed(choice: Choice, context: int) -> float | None:
    """Tokens a second of one request, in the same context."""
    settings = choice.settings._replace(context=context)
    return roofline(choice.option.model, settings, choice.budget).decode_tokens_per_s


ABSURD: Final = re.compile(
    r"after at least 0\.0\d? s\b|GPU with [\d.]+ \wiB \([\d.]+ \wiB|nats a token on pocket|same images"
)


def check_text(case: Case, outcome: Outcome) -> Iterator[Violation]:
    """Figures that help nobody, and lines that are said twice."""
    if outcome.plan is None or outcome.machine is None:
        return
    text = plain(report(outcome.plan, outcome.machine, pull=True), verbose=False)
    if (found := ABSURD.search(text)) and not (found[0] == "same images" and (outcome.choice or 0)):
        yield "text", found[0]
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        if line.startswith("  snugvl ") and shlex.join(shlex.split(line, comments=True)) != line.strip():
            yield "text", f"a remark stands on a command's line: {line}"
    if len(set(lines)) < len(lines):
        yield "text", "a line stands twice"


def check(case: Case, pick: random.Random, folder: Path) -> Iterator[Violation]:
    """All of one case."""
    outcome = planned(case)
    if outcome.code not in (0, 2, 3, 4, 5) or (outcome.plan is None and not outcome.said):
        yield "crash", f"exit {outcome.code}: {outcome.said}"
    if outcome.plan is None:
        return
    checks: tuple[Callable[..., Iterator[Violation]], ...] = (check_engine, check_remedies, check_text)
    for each in checks:
        yield from each(case, outcome)
    yield from check_command(case, outcome, folder)
    yield from check_more(case, outcome, pick)


def built() -> Any:
    """The command line, put together once."""
    return mock.patch.object(app, "app", typer.main.get_command(app.app))


def run(
    cases: int, seed: int, files: Sequence[str], folder: Path
) -> tuple[Counter[str], dict[str, list[str]]]:
    """Counts by kind, and the violations with what repeats them."""
    counts: Counter[str] = Counter()
    found: dict[str, list[str]] = {}
    with built():
        for number in range(cases):
            pick = random.Random(f"{seed} {number}")
            case = random_case(pick, files)
            counts["cases"] += 1
            for kind, what in check(case, pick, folder):
                counts[kind] += 1
                found.setdefault(kind, []).append(f"{number}: snugvl {shlex.join(case.words)}\n      {what}")
                print(f"{kind} {found[kind][-1]}", file=sys.stderr, flush=True)
            if counts["cases"] % 500 == 0:
                print(f"{counts['cases']:,} cases so far", file=sys.stderr, flush=True)
    return counts, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts, found = run(given.cases, given.seed, ggufs(Path(folder)), Path(folder))
    for kind, lines in found.items():
        print(f"{kind}: {len(lines)}")
        for line in lines[: given.show]:
            print(f"  {line}")
    print(", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
