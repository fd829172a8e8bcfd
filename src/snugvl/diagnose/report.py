"""One file about this machine and our engine on it, to attach to an issue: `snugvl doctor --report`.

It is made of figures, versions, and names that makers give: of cards, networks and kernels. Names of people,
machines, folders and models aren't among what it is made of, nor are prompts and keys; and what this person
and this machine are called is struck out of the whole, should it stand there all the same.
"""

import getpass
import os
import platform
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from snugvl.core.kernel_checks import OK, KernelCheck
from snugvl.core.sizes import format_size
from snugvl.hardware.calibration import estimate
from snugvl.hardware.machine import SYSTEMS, Gpu, Machine
from snugvl.hardware.software import TorchBuild
from snugvl.version import __version__

STRUCK: Final = "(struck out)"
LEAST_NAME: Final = 3  # letters of a name that is struck out; shorter ones stand in many words
PLAIN: Final = {"root", "user", "linux", "ubuntu", "localhost", "home", "snugvl"}  # that tell nobody anything
PACKAGES: Final = ("torch", "triton", "transformers", "vllm", "llama_cpp_python")


def report(
    machine: Machine, build: TorchBuild | None, checks: Sequence[KernelCheck],
    last: Mapping[str, Mapping[str, Any]],
) -> str:  # fmt: skip
    """The whole file, in Markdown. `last`: see `read_last_start`."""
    lines = [
        "# snugvl: this machine", "", *_machine(machine, build), *_start(last.get("start")),
        *_speed(last.get("speed")), *_checks(checks),
    ]  # fmt: skip
    return struck_out("\n".join(lines) + "\n", names())


def _machine(machine: Machine, build: TorchBuild | None) -> Iterator[str]:
    rows = [
        ("snugvl", __version__),
        ("system", f"{SYSTEMS[machine.os]}{', in a container' if machine.container else ''} ({_system()})"),
        ("WSL2", "yes" if machine.os == "wsl2" else "no"),
        ("Python", platform.python_version()),
        ("CUDA of torch", ".".join(map(str, build.cuda)) if build and build.cuda else "none"),
        *((package, version) for package in PACKAGES if (version := _version(package))),
        ("processor", f"{machine.cpu_cores} cores"),
        (
            "host memory",
            f"{format_size(machine.ram_total_bytes)}, {format_size(machine.ram_free_bytes)} free",
        ),
    ]
    yield from _table(("what", ""), rows)
    for gpu in machine.gpus:
        yield from ("", f"## {gpu.name}", "", *_table(("what", ""), _gpu(gpu)))
    if not machine.gpus:
        yield from ("", "No GPU that CUDA shows.")


def _gpu(gpu: Gpu) -> Iterator[tuple[str, str]]:
    capability = gpu.compute_capability
    yield "compute capability", "unknown" if capability is None else "{}.{}".format(*capability)
    yield "driver", gpu.driver or "unknown"
    yield "memory", f"{format_size(gpu.total_bytes)}, {format_size(gpu.free_bytes)} free"
    if gpu.cuda_total_bytes is not None:
        yield "memory that CUDA counts", format_size(gpu.cuda_total_bytes)
    measured = gpu.context_bytes is not None
    context = gpu.context_bytes if gpu.context_bytes is not None else estimate(gpu)
    basis = gpu.context_basis or ("measured" if measured else "estimated")
    yield "CUDA context with torch", f"{format_size(context)} ({basis})"


def _start(start: Mapping[str, Any] | None) -> Iterator[str]:
    yield from ("", "## The last start", "")
    if start is None:
        yield "Our own engine hasn't started on a GPU here yet."
        return
    rows = start.get("rows")
    told = ("when", "network", "parameters", "weights", "kv_cache", "context")
    yield from _table(
        ("what", ""), [(name.replace("_", " "), str(start[name])) for name in told if name in start]
    )
    yield ""
    yield from _table(
        ("memory", "planned", "taken"),
        [
            (str(row.get("name")), _size(row.get("planned_bytes")), _size(row.get("measured_bytes")))
            for row in (rows if isinstance(rows, list) else [])
            if isinstance(row, dict)
        ],
    )


def _speed(speed: Mapping[str, Any] | None) -> Iterator[str]:
    yield from ("", "## Speed", "")
    if speed is None:
        yield "Not measured: `snugvl bench` does."
        return
    yield from _table(("`snugvl bench`", ""), [(name, str(value)) for name, value in speed.items()])


def _checks(checks: Sequence[KernelCheck]) -> Iterator[str]:
    yield from ("", "## Kernels", "")
    if not checks:
        yield "Not checked on this card, driver and torch: `snugvl doctor --check` does."
    for check in checks:
        on, bad = check.on, [each for each in check.verdicts if each.verdict != OK]
        state = f"{len(bad)} not ok" if bad else "all ok"
        taken = f"; kernels and libraries took {_size(check.loaded_bytes)}" if check.loaded_bytes >= 0 else ""
        whole = "" if check.whole else ", not all of them"
        yield (
            f"{check.network} on {on.gpu} (compute {on.capability}, driver {on.driver or 'unknown'}, torch "
            f"{on.torch}, Triton {on.triton}, snugvl {on.snugvl}), {check.when}: {len(check.verdicts)} "
            f"checked{whole} in {check.seconds:.0f} s, {state}{taken}."
        )
        yield ""
        yield from checked_rows(check)
        yield ""


def checked_rows(check: KernelCheck) -> Iterator[str]:
    """A table of a check, what is wrong first."""
    ordered = sorted(check.verdicts, key=lambda each: (each.verdict == OK, each.kernel, each.shape))
    yield from _table(
        ("kernel", "shape", "max error", "ms", "verdict"),
        [
            (
                each.kernel, each.shape or "–", "–" if each.error < 0 else f"{each.error:.2g}",
                f"{each.ms:.2f}" if each.ms else "–", each.verdict,
            )
            for each in ordered
        ],
    )  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    every = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(head))]
    for number, row in enumerate(every):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"


def _size(nbytes: object) -> str:
    return format_size(nbytes) if isinstance(nbytes, int) and nbytes >= 0 else "–"


def _system() -> str:
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return platform.system()


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def names(environ: Mapping[str, str] = os.environ) -> set[str]:
    """Names of this person and this machine, and their home folder."""
    found = {environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME", "COMPUTERNAME")}
    with suppress(OSError, KeyError):
        found.add(getpass.getuser())
    with suppress(OSError):
        found |= {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(RuntimeError):
        found |= {str(Path.home()), Path.home().name}
    return {name for name in found if len(name) >= LEAST_NAME and name.lower() not in PLAIN}


def struck_out(text: str, found: Iterable[str]) -> str:
    """`text` without these names as words of their own."""
    for name in sorted(found, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", STRUCK, text, flags=re.IGNORECASE)
    return text
