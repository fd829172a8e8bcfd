"""`snugvl doctor`."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snugvl.cli import options
from snugvl.cli.machine_options import MachineChoice, machine_from
from snugvl.cli.stderr import say
from snugvl.cli.stdout import write

if TYPE_CHECKING:
    from snugvl.hardware.machine import Machine


@options.grouped()
def doctor(
    *,
    machine: MachineChoice,
    measure_context: Annotated[
        bool,
        typer.Option("--measure-context", help="Measure what a CUDA context costs here, and remember it."),
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FILE", help="Write the machine to a file for --machine."),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option("--log", metavar="FILE", help="Say why an engine failed, from its log; - reads a pipe."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object, described in docs/machine.md.")
    ] = False,
) -> None:
    """Show the memory of this machine, who holds it, what is odd, and what would free some."""
    if log is not None:
        if not machine.here or measure_context or record is not None:
            raise typer.BadParameter("--log reads an engine's log; give it no other option but --json")
        _explain(log, json=json)
        return
    if measure_context and not machine.here:
        raise typer.BadParameter("--measure-context measures this machine, not one that is described")
    from snugvl.checkpoint.cached import cached
    from snugvl.cli import doctor_view
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
        document = doctor_view.as_document(found, advice, build)
        write(json_module.dumps(document, ensure_ascii=False, indent=2) + "\n")
    else:
        doctor_view.show(found, advice)


def _measured(machine: Machine) -> Machine:
    """`machine` with the context's cost measured on every kind of GPU once."""
    from snugvl.errors import EngineError
    from snugvl.hardware import calibration

    if not machine.gpus:
        raise EngineError("there is no GPU here to measure a CUDA context on: " + " ".join(machine.notes))
    costs: dict[str, int] = {}
    for gpu in machine.gpus:
        if gpu.name not in costs:
            costs[gpu.name] = calibration.measure(gpu).context_bytes
    return replace(machine, gpus=tuple(replace(gpu, context_bytes=costs[gpu.name]) for gpu in machine.gpus))


def _explain(log: str, *, json: bool) -> None:
    """Print why an engine failed, from a file or, for "-", a pipe; the exit code is 0 whatever it says."""
    from snugvl.diagnose.explain import explain_file, explain_stream
    from snugvl.diagnose.result import to_json, to_text

    diagnosis = explain_stream(sys.stdin.buffer) if log == "-" else explain_file(Path(log))
    write(to_json(diagnosis) + "\n" if json else to_text(diagnosis))


def _record(machine: Machine, path: Path) -> None:
    from snugvl.hardware.recording import record

    path.write_text(record(machine), encoding="utf-8")
    say(f"wrote {path}; it names the processes that hold GPU memory")
