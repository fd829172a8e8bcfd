"""`snugvl plan`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from snugvl.cli import options
from snugvl.cli.options import MachineChoice, machine_from
from snugvl.cli.terminal import printable, say, write
from snugvl.core.folders import write_named
from snugvl.core.formats import Floor
from snugvl.core.options import LoadOptions
from snugvl.errors import DoesNotFit

if TYPE_CHECKING:
    from snugvl.hardware.machine import Machine
    from snugvl.planner.plan import Choice, Plan
    from snugvl.planner.report.sections import Measured
    from snugvl.planner.solve import Candidate
    from snugvl.planner.wishes import Wishes


MOST_HELD = 12  # GGUF models whose headers a plan reads, each a fifth of a second

Model = Annotated[
    str | None,
    Argument(
        metavar="[MODEL]",
        autocompletion=options.known_models,
        help="A folder, a Hub id or pocket; without one the best of the catalogue is recommended.",
    ),
]
MinImageTokens = Annotated[
    int | None, Option(help="Tokens that a large image must keep at least (256; 1024 for --task detect).")
]
Task = Annotated[Literal["caption", "ask", "scene", "detect"], Option(help="The task that the plan is for.")]
Quality = Annotated[Floor, Option(help="The coarsest weights that you accept.")]
Json = Annotated[bool, Option("--json", help="The whole plan as JSON (docs/plan.md).")]
Save = Annotated[Path | None, Option(metavar="FILE", help="Save the plan; snugvl serve --plan FILE runs it.")]
Verbose = Annotated[
    bool, Option("--verbose", "-v", help="Show every component of memory, every engine, every reason.")
]
Offline = Annotated[bool, Option("--offline", help="Use what is on this machine and the built-in catalogue.")]


@options.grouped(options.load_options("plan"))
def plan(
    model: Model = None,
    *,
    load: LoadOptions,
    min_image_tokens: MinImageTokens = None,
    task: Task = "caption",
    quality: Quality = "any",
    machine: MachineChoice,
    json: Json = False,
    save: Save = None,
    verbose: Verbose = False,
    offline: Offline = False,
) -> None:
    """Say what fits, before anything is downloaded: the best settings, the memory, and why not more."""
    from snugvl.planner.recommend import planned

    wishes = _wishes(load, min_image_tokens=min_image_tokens, task=task, quality=quality)
    candidates = _candidates(model, offline, wishes.images > 0)
    found = machine_from(machine)
    result = planned(candidates, found, wishes, _held() if model is None and machine.here else ())
    _put(result, found, json=json, verbose=verbose)
    if save is not None:
        _save(result, found, save)
    if result.choice is None:
        raise typer.Exit(DoesNotFit.exit_code)


def _wishes(load: LoadOptions, **named: Any) -> Wishes:
    """The wishes; two that exclude one another are a usage error."""
    from snugvl.errors import RequestError
    from snugvl.planner.wishes import wishes_of

    images = (0 if load.language_only else 1) if load.images is None else load.images
    try:
        return wishes_of(load, sees=True, images=images, **named)
    except RequestError as error:
        raise typer.BadParameter(str(error)) from None


def _candidates(model: str | None, offline: bool, sees: bool) -> list[Candidate]:
    """The given model, or every form of every model of the catalogue that is ranked."""
    from snugvl.planner.solve import Candidate

    if model is not None:
        from snugvl.checkpoint.read import facts_of

        return [Candidate(facts_of(model, offline=offline))]
    from snugvl.planner.recommend import catalogue_candidates

    return catalogue_candidates(sees=sees)


def _held() -> list[Candidate]:
    """The GGUF models on this machine that are of a ranked model of the catalogue, the largest files first.
    Unreadable ones are left out: they weren't named."""
    from contextlib import suppress

    from snugvl.checkpoint.catalogue import alike
    from snugvl.checkpoint.gguf_files import gguf_files, ggufs_here
    from snugvl.checkpoint.read import facts_of
    from snugvl.errors import SnugvlError
    from snugvl.planner.solve import Candidate

    sizes: dict[str, int] = {}
    for name in ggufs_here():
        with suppress(SnugvlError, OSError):
            files = gguf_files(name)
            sizes[name] = files.nbytes if files is not None else 0
    found = []
    for name in sorted(sizes, key=lambda each: -sizes[each])[:MOST_HELD]:
        with suppress(SnugvlError, OSError):
            facts = facts_of(name, offline=True)
            if (entry := alike(facts)) is not None:
                found.append(Candidate(facts, -(entry.quality_rank or 0)))
    return found


def _save(plan: Plan, machine: Machine, path: Path) -> None:
    import json

    from snugvl.planner.report.document import document

    path.parent.mkdir(parents=True, exist_ok=True)
    write_named(path, json.dumps(document(plan, machine, _measured(machine)), indent=2) + "\n")
    run = f"; run it with: snugvl serve --plan {shlex.quote(str(path))}" if plan.choice else ""
    say(f"the plan is in {path}{run}")


def _here(plan: Plan, machine: Machine) -> bool:
    """Whether the model's files are on this machine; False for a plan of another machine."""
    if plan.choice is None or plan.choice.option.model.facts.source in ("folder", "file"):
        return True
    if machine.source != "probed":
        return False
    from snugvl.checkpoint.locate import locate
    from snugvl.errors import SnugvlError

    try:
        locate(plan.choice.option.model.name)
    except SnugvlError:
        return False
    return True


def _put(plan: Plan, machine: Machine, *, json: bool, verbose: bool) -> None:
    from functools import partial

    from snugvl.planner.report.sections import report as full_report

    measured = _measured(machine)
    report = partial(full_report, pull=not _here(plan, machine))
    if json:
        import json as encoder

        from snugvl.planner.report.document import document

        write(encoder.dumps(document(plan, machine, measured), indent=2) + "\n")
    elif sys.stdout.isatty():
        from snugvl.planner.report.plain import show

        show(report(plan, machine, measured), sys.stdout, verbose=verbose)
    else:
        from snugvl.planner.report.plain import plain

        write(printable(plain(report(plan, machine, measured), verbose=verbose)))


def _measured(machine: Machine) -> Measured | None:
    """Measurements of earlier runs with the same settings on this machine; None for a described one."""
    if machine.source != "probed" or not machine.gpus:
        return None
    from snugvl.hardware import calibration

    known = calibration.load(calibration.calibration_file())

    def measured(choice: Choice, component: str) -> int | None:
        gpu = choice.budget.gpu
        place = calibration.place_of(gpu) if gpu is not None else None
        found = known.measured(choice.option.engine, component, place, subject=choice.subject)
        return found.measured_bytes if found else None

    return measured
