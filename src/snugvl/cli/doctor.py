"""`snugvl doctor`: the same lines for a terminal, in colour, and for a pipe, plain."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Argument, Option

from snugvl.cli import options
from snugvl.cli.options import DEFAULT_MODEL, MachineChoice, machine_from
from snugvl.cli.terminal import printable, say, write, write_json
from snugvl.cli.terminal import show as show_lines
from snugvl.core.folders import write_named
from snugvl.core.sizes import format_size
from snugvl.core.wrapping import columns, styled, wrapped, wrapped_command
from snugvl.errors import EngineError
from snugvl.version import __version__

if TYPE_CHECKING:
    from snugvl.core.kernel_checks import KernelCheck
    from snugvl.hardware.advice import Advice
    from snugvl.hardware.machine import Gpu, Machine
    from snugvl.hardware.software import TorchBuild

SCHEMA: Final = 1
BAR_CELLS: Final = 40
WIDEST: Final = 110
_SIZE_WIDTH: Final = 11

Line = list[tuple[str, str]]  # pieces of text, each with a style of rich or ""


@options.grouped()
def doctor(
    model: Annotated[
        str | None, Argument(metavar="[MODEL]", help="With --check: whose kernels; pocket by default.")
    ] = None,
    *,
    machine: MachineChoice,
    check: Annotated[
        bool,
        Option("--check", help="Check every kernel that MODEL would use on this GPU beside plain torch."),
    ] = False,
    report: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write a file for an issue, without names of people, folders and models; - prints it.",
        ),
    ] = None,
    measure_context: Annotated[
        bool, Option("--measure-context", help="Measure what a CUDA context costs here, and remember it.")
    ] = False,
    record: Annotated[
        Path | None, Option(metavar="FILE", help="Write the machine to a file for --machine.")
    ] = None,
    log: Annotated[
        str | None, Option(metavar="FILE", help="Say why an engine failed, from its log; - reads a pipe.")
    ] = None,
    json: Annotated[bool, Option("--json", help="One JSON object, described in docs/machine.md.")] = False,
) -> None:
    """Show the memory of this machine, who holds it, what is odd, and what would free some."""
    if log is not None:
        if not machine.here or measure_context or record is not None or check or report is not None or model:
            raise typer.BadParameter("--log reads an engine's log; give it no other option but --json")
        _explain(log, json=json)
        return
    if measure_context and not machine.here:
        raise typer.BadParameter("--measure-context measures this machine, not one that is described")
    if (check or report is not None) and not machine.here:
        raise typer.BadParameter("--check and --report are of this machine, not of one that is described")
    if model is not None and not check:
        raise typer.BadParameter(f"{model}: a model is for --check; snugvl plan {model} plans for it")
    if check:
        _check(model or DEFAULT_MODEL, json=json)
    if report is not None:
        _report_to(report, machine_from(machine))
    if check or report is not None:
        return
    from snugvl.checkpoint.cached import cached
    from snugvl.hardware import software
    from snugvl.hardware.advice import LOW_DISK_BYTES, advise

    found = machine_from(machine)
    if measure_context:
        found = _measured(found)
    if record is not None:
        _record(found, record)
    build = software.torch_build() if machine.here else None
    low_disk = machine.here and found.disk_free_bytes < LOW_DISK_BYTES
    models = cached() if low_disk else []
    downloads = [(each.name, each.nbytes) for each in sorted(models, key=lambda each: -each.nbytes)]
    tools = software.build_tools() if machine.here else None
    advice = advise(found, build, downloads, tools)
    if json:
        document = as_document(found, advice, build)
        kernels = _checks_on(found) if machine.here else []
        write_json(document | {"kernels": [asdict(each) for each in kernels]})
    else:
        show(found, advice)
        for sentence in _told(_checks_on(found) if machine.here else ()):
            show_lines(sentence, 2)


def _measured(machine: Machine) -> Machine:
    """`machine` with the context's cost measured on every kind of GPU once."""
    from snugvl.hardware import calibration

    if not machine.gpus:
        raise EngineError("there is no GPU here to measure a CUDA context on: " + " ".join(machine.notes))
    costs: dict[str, int] = {}
    for gpu in machine.gpus:
        if gpu.name not in costs:
            costs[gpu.name] = calibration.measure(gpu).context_bytes
    return replace(machine, gpus=tuple(replace(gpu, context_bytes=costs[gpu.name]) for gpu in machine.gpus))


def _check(model: str, *, json: bool) -> None:
    """Check a model's kernels and print the table; exit code 1 where one isn't used."""
    from snugvl.core.kernel_checks import told
    from snugvl.diagnose.report import checked_rows
    from snugvl.loading import check_kernels

    found = check_kernels(model, lambda detail, _: say(detail))
    if json:
        write_json({"schema": SCHEMA, "check": asdict(found)})
    else:
        show_lines(printable("\n".join((*checked_rows(found), "", *told(found.withdrawn)))), 2)
        whole = "" if found.whole else "; not all: snugvl doctor --check goes on"
        show_lines(f"{len(found.verdicts)} kernels checked in {found.seconds:.0f} s{whole}", 2)
    if found.withdrawn:
        raise typer.Exit(1)


def _report_to(path: Path, machine: Machine) -> None:
    """Write the file for an issue, or print it."""
    from snugvl.core.ledger import last_start_file, read_last_start
    from snugvl.diagnose.report import report
    from snugvl.hardware.software import torch_build

    text = report(machine, torch_build(), _checks_on(machine), read_last_start(last_start_file()))
    if str(path) == "-":
        write(printable(text))
        return
    write_named(path, text)
    say(f"wrote {path}; it has no name of a person, a folder or a model: read it before you attach it")


def _checks_on(machine: Machine) -> list[KernelCheck]:
    """Checks of this machine's cards, with the driver, torch and snugvl that are here."""
    from snugvl.core.kernel_checks import checks_file, load
    from snugvl.hardware.software import torch_build

    build = torch_build()
    here = {(gpu.name, gpu.driver or "", build.version if build else "", __version__) for gpu in machine.gpus}
    found = load(checks_file())
    return [each for each in found if (each.on.gpu, each.on.driver, each.on.torch, each.on.snugvl) in here]


def _told(checks: Sequence[KernelCheck]) -> Iterator[str]:
    """Lines about the kernels of this machine's cards."""
    from snugvl.core.kernel_checks import told

    if checks:
        kernels = len({(each.kernel, each.shape) for check in checks for each in check.verdicts})
        bad = {each.kernel: each for check in checks for each in check.withdrawn}
        yield ""
        yield f"Kernels: {kernels} checked beside plain torch, {len(bad)} not used; --report lists them"
        yield from (f"  - {sentence}" for sentence in told(bad.values()))


def _explain(log: str, *, json: bool) -> None:
    """Print why an engine failed, from a file or, for "-", a pipe; the exit code is 0 whatever it says."""
    from snugvl.diagnose.explain import explain_file, explain_stream
    from snugvl.diagnose.result import to_json, to_text

    diagnosis = explain_stream(sys.stdin.buffer) if log == "-" else explain_file(Path(log))
    if json:
        write(to_json(diagnosis) + "\n")
        return
    width, command = columns(sys.stdout), f"  {diagnosis.command}"
    for line in to_text(diagnosis).splitlines():
        whole = line == command
        write((wrapped_command(line.strip(), width, 2) if whole else wrapped(line, width, 4)) + "\n")


def _record(machine: Machine, path: Path) -> None:
    from snugvl.hardware.machine import record

    write_named(path, record(machine))
    say(f"wrote {path}; it names the processes that hold GPU memory")


def as_document(machine: Machine, advice: Advice, build: TorchBuild | None) -> dict[str, Any]:
    """The report as `--json` prints it; docs/machine.md describes it."""
    from snugvl.hardware.machine import as_json

    return {
        "schema": SCHEMA,
        "machine": as_json(machine),
        "torch": None if build is None else asdict(build),
        "odd": list(advice.odd),
        "steps": [asdict(step) for step in advice.steps],
    }


def show(machine: Machine, advice: Advice) -> None:
    """Print the report."""
    terminal = sys.stdout.isatty()
    width = min(WIDEST, columns(sys.stdout) or WIDEST) if terminal else None
    lines = [[(printable(text), style) for text, style in line] for line in _report(machine, advice, width)]
    if not terminal:
        write("".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    for line in lines:
        console.print(styled(Text.assemble(*line), width, 2), soft_wrap=True)


def _report(machine: Machine, advice: Advice, width: int | None) -> Iterator[Line]:
    from snugvl.hardware.machine import SYSTEMS

    where = {**SYSTEMS, "other": "Another system"}[machine.os] + (
        " in a container" if machine.container else ""
    )
    told = {"probed": "", "described": " (described)", "recorded": " (recorded)"}[machine.source]
    cores = "1 core" if machine.cpu_cores == 1 else f"{machine.cpu_cores} cores"
    yield [(f"{where}{told}", "bold"), (f", {cores}", "")]
    memory = (
        f"System memory {format_size(machine.ram_free_bytes)} free of {format_size(machine.ram_total_bytes)}"
    )
    disk = f", disk {format_size(machine.disk_free_bytes)} free" if machine.source != "described" else ""
    yield [(memory + disk, "")]
    for gpu in machine.gpus:
        yield []
        yield from _gpu(gpu, width, here=machine.source == "probed")
    for gpu in machine.others:
        yield []
        memory = f"{format_size(gpu.free_bytes)} free of {format_size(gpu.total_bytes)}"
        where = f" ({gpu.listed})" if gpu.listed else ""  # of a description nobody has asked llama.cpp
        yield [(gpu.name, "bold"), (f"{where}, {memory}: GGUF files run on it, by llama.cpp.", "")]
    if not machine.gpus and not machine.others:
        yield []
        apple = " On Apple silicon llama.cpp runs GGUF files on the GPU." if machine.os == "macos" else ""
        yield [("No GPU that snugvl can use", "bold"), (f": models run on the processor, slowly.{apple}", "")]
    if advice.odd:
        yield []
        yield [("What is odd", "bold")]
        for sentence in advice.odd:
            yield from _hanging("  - ", "yellow", sentence, width)
    yield []
    if not advice.steps:
        described = machine.source == "described"  # by a person, who may say with --held what programs hold
        why = "nothing is known of other programs' memory" if described else "no step would free much memory"
        yield [("Nothing to free", "bold"), (f": {why}.", "")]
        return
    yield [("What to do", "bold"), (": on the left what each step frees at most", "")]
    for step in advice.steps:
        place = f"cuda:{step.gpu}  " if step.gpu is not None and len(machine.gpus) > 1 else ""
        kind = {"gpu": "", "ram": "RAM: ", "disk": "disk: "}[step.resource]
        yield from _hanging(
            f"{format_size(step.frees_bytes):>{_SIZE_WIDTH}}  ", "green", f"{place}{kind}{step.text}", width
        )


def _gpu(gpu: Gpu, width: int | None, *, here: bool) -> Iterator[Line]:
    from snugvl.hardware.calibration import estimate
    from snugvl.planner.capabilities import NATIVE, older

    facts = [format_size(gpu.total_bytes)]
    if gpu.compute_capability is not None:
        facts.append("compute {}.{}".format(*gpu.compute_capability))
    facts.append(f"{gpu.bandwidth / 1e9:.0f} GB/s" if gpu.bandwidth else "bandwidth unknown")
    if gpu.driver is not None:
        facts.append(f"driver {gpu.driver}")
    yield [(f"cuda:{gpu.index}  {gpu.name}", "bold"), (f"  {', '.join(facts)}", "")]
    cells = min(BAR_CELLS, width - 4) if width else BAR_CELLS
    held = round(cells * gpu.held_bytes / gpu.total_bytes)
    full, empty = _blocks()
    free = f"{format_size(gpu.free_bytes)} free"
    yield [
        ("  ", ""),
        (full * held, "red"),
        (empty * (cells - held), "green"),
        (f"  {format_size(gpu.held_bytes)} held, ", ""),
        (free, "bold green"),
    ]
    for tenant in gpu.tenants:
        process = "" if tenant.pid is None else f" (process {tenant.pid})"
        size = f"{format_size(tenant.held_bytes):>{_SIZE_WIDTH}}  "
        yield from _hanging(size, "", tenant.name + process, width)
    if gpu.context_bytes is None:
        cost_bytes = estimate(gpu)
        source = "estimated; --measure-context measures it" if here else "estimated"
    else:
        basis = gpu.context_basis or "measured"
        cost_bytes, source = gpu.context_bytes, f"{basis} with driver {gpu.driver}"
    size = f"{format_size(cost_bytes):>{_SIZE_WIDTH}}  "
    text = f"of what is free goes to the CUDA context of each program with torch, once it starts ({source})"
    yield from _hanging(size, "cyan", text, width)
    if (why := older(gpu.compute_capability, NATIVE)) is not None:
        text = f"Too old for snugvl's engines but llama.cpp's, which runs GGUF files on it: {why}."
        yield from _hanging("  ", "yellow", text, width)


def _hanging(lead: str, style: str, text: str, width: int | None) -> Iterator[Line]:
    """`text` after `lead`, wrapped under itself on a terminal."""
    for number, row in enumerate(wrapped(text, width, len(lead), len(lead)).split("\n")):
        yield [(lead, style), (row, "")] if number == 0 else [(row, "")]


def _blocks() -> tuple[str, str]:
    """(held, free): characters of the bar that this output can show."""
    try:
        "█░".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#", "."
    return "█", "░"
