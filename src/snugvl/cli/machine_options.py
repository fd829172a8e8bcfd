"""The options that say which machine is meant: this one, one that is described, or one that was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from snugvl.cli.values import size
from snugvl.errors import InputError

if TYPE_CHECKING:
    from snugvl.hardware.machine import Machine


def cards(incomplete: str) -> list[str]:
    """Names of GPUs that can be described, for the shell."""
    from snugvl.hardware.gpus import known

    products = (model.product.removeprefix("NVIDIA ").replace(" ", "-") for model in known())
    short = dict.fromkeys(name.lower().removeprefix("geforce-") for name in products)
    return [name for name in ("none", *short) if name.startswith(incomplete)]


Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        autocompletion=cards,
        help="Describe a machine: its GPU, such as rtx-5060, or none.",
    ),
]
Os = Annotated[
    Literal["linux", "wsl2", "windows", "macos", "other"] | None,
    typer.Option(
        "--os", help="The described machine's system (linux by default, macos with a GPU of Apple's)."
    ),
]
Held = Annotated[
    str | None,
    typer.Option(
        "--held",
        metavar="SIZE",
        callback=size,
        help="GPU memory that other programs hold there, such as 951MiB.",
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        "--vram",
        metavar="SIZE",
        callback=size,
        help="GPU memory in all, such as 8151MiB; known for most GPUs.",
    ),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", metavar="N", help="How many of these GPUs the machine has.")
]
Ram = Annotated[
    str | None, typer.Option("--ram", metavar="SIZE", callback=size, help="System memory, such as 32GiB.")
]
MachineFile = Annotated[
    Path | None,
    typer.Option("--machine", metavar="FILE", help="A recording that snugvl doctor --record made."),
]

MACHINE: dict[str, Any] = {
    "gpu": Gpu,
    "os": Os,
    "held": Held,
    "vram": Vram,
    "gpus": Gpus,
    "ram": Ram,
    "machine": MachineFile,
}


@dataclass(frozen=True, slots=True)
class MachineChoice:
    """Which machine a command means; nothing given: this one."""

    gpu: str | None = None
    os: Literal["linux", "wsl2", "windows", "macos", "other"] | None = None
    held: str | None = None
    vram: str | None = None
    gpus: int | None = None
    ram: str | None = None
    machine: Path | None = None

    @property
    def described(self) -> bool:
        """A machine is described by its GPU."""
        return self.gpu is not None or self.vram is not None

    @property
    def here(self) -> bool:
        """This machine is meant."""
        return not self.described and self.machine is None

    def __post_init__(self) -> None:
        details = {"--os": self.os, "--held": self.held, "--gpus": self.gpus, "--ram": self.ram}
        extra = next((option for option, value in details.items() if value is not None), None)
        if self.machine is not None and (self.described or extra):
            named = extra or ("--gpu" if self.gpu is not None else "--vram")
            raise typer.BadParameter(f"--machine replays a recording; {named} describes another machine")
        if extra and not self.described:
            raise typer.BadParameter(f"{extra} describes a machine: name its GPU too, with --gpu or --vram")


def machine_from(options: MachineChoice) -> Machine:
    """The machine that is meant.

    Raises:
        typer.BadParameter: a description that can't be.
        InputError: a recording that can't be read.
    """
    if options.machine is not None:
        from snugvl.hardware.recording import replay

        return replay(options.machine)
    if options.described:
        from snugvl.hardware.describe import describe
        from snugvl.hardware.gpus import is_mac

        mac = options.gpu is not None and is_mac(options.gpu)
        try:
            return describe(
                options.gpu,
                os=options.os or ("macos" if mac else "linux"),
                held=options.held,
                vram=options.vram,
                count=1 if options.gpus is None else options.gpus,
                ram=options.ram,
            )
        except InputError as error:  # whatever is wrong was said on the command line
            raise typer.BadParameter(str(error)) from None
    from snugvl.hardware.probe import probe

    return probe()
