"""The options that commands share, the values that they become, and how `--help` reads.

A command takes a whole group of options as one parameter: `choice: ModelChoice`, `load: LoadOptions`,
`generation: Generation`, `machine: MachineChoice`. `grouped` spells the group out for typer and puts the
value together. So a new way to load a model is a row of `LoadOptions`, which says which commands have it.
Values are checked when they are typed or set, and completed by the shell.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_type_hints

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from snugvl.cli.terminal import say
from snugvl.core.network import http_address
from snugvl.core.options import ROWS, LoadOptions, OptionRow, flag
from snugvl.core.sampling import SamplingParams
from snugvl.core.sizes import format_size, parse_size
from snugvl.core.wrapping import NARROWEST, wrapped
from snugvl.errors import InputError, RequestError
from snugvl.planner.engines import rules_of

if TYPE_CHECKING:
    from snugvl.hardware.machine import Machine

SOLD_AS: Final = ("--vram", "--ram")  # memory that people know by the number on its box, which is of GiB


def address(value: str | None) -> str | None:
    """Check a server's address and return it, with http:// where that was left out.

    Raises:
        typer.BadParameter: it is not an address.
    """
    found = None if value is None else http_address(value)
    if value is not None and found is None:
        raise typer.BadParameter(
            f"{value!r} is not the address of a server; give one such as http://127.0.0.1:8000"
        )
    return found


def device(value: str | None) -> str | None:
    """Check a device's name and return it.

    Raises:
        typer.BadParameter: it is not such a value.
    """
    if value is not None:
        try:
            LoadOptions(device=value)
        except RequestError as error:
            raise typer.BadParameter(str(error)) from None
    return value


def size(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Check a size and return it as it was typed.

    Raises:
        typer.BadParameter: it is not a size, or 0 where that is not allowed.
    """
    if value is not None:
        option = parameter.opts[0]
        try:
            nbytes = parse_size(value, option)
        except InputError as error:
            raise typer.BadParameter(str(error)) from None
        if not nbytes and option != "--held":
            raise typer.BadParameter(f"{option} {value!r} is nothing; write it like 951MiB, 7.2GiB or 8GB")
        if option in SOLD_AS and value.strip().lower().endswith("gb"):
            number = value.strip()[:-2].strip()
            say(f"{option} {value} is {format_size(nbytes)}; what is sold as {number} GB has {number}GiB")
    return value


def _here() -> list[str]:
    from snugvl.checkpoint.cached import cached

    return ["pocket", *(each.name for each in cached())]


def downloaded_models(incomplete: str) -> list[str]:
    """Names of models on this machine that begin so, for the shell."""
    return [name for name in _here() if name.startswith(incomplete)]


def known_models(incomplete: str) -> list[str]:
    """Names of models on this machine and in the catalogue that begin so, for the shell."""
    from snugvl.checkpoint.catalogue import entries

    known = dict.fromkeys(form.repo for entry in entries() for form in entry.forms)
    known |= dict.fromkeys(_here())
    return [name for name in known if name.startswith(incomplete)]


def cards(incomplete: str) -> list[str]:
    """Names of GPUs that can be described, for the shell."""
    from snugvl.hardware.gpus import known

    products = (model.product.removeprefix("NVIDIA ").replace(" ", "-") for model in known())
    short = dict.fromkeys(name.lower().removeprefix("geforce-") for name in products)
    return [name for name in ("none", *short) if name.startswith(incomplete)]


@dataclass(frozen=True, slots=True)
class MachineChoice:
    """Options that describe a machine; without any of them this machine is meant."""

    gpu: Annotated[
        str | None,
        Option(
            metavar="NAME",
            autocompletion=cards,
            help="Describe a machine: its GPU, such as rtx-5060, or none.",
        ),
    ] = None
    os: Annotated[
        Literal["linux", "wsl2", "windows", "macos", "other"] | None,
        Option(help="The described machine's system (linux by default, macos with a GPU of Apple's)."),
    ] = None
    held: Annotated[
        str | None,
        Option(
            metavar="SIZE", callback=size, help="GPU memory that other programs hold there, such as 951MiB."
        ),
    ] = None
    vram: Annotated[
        str | None,
        Option(
            metavar="SIZE", callback=size, help="GPU memory in all, such as 8151MiB; known for most GPUs."
        ),
    ] = None
    gpus: Annotated[int | None, Option(metavar="N", help="How many of these GPUs the machine has.")] = None
    ram: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            callback=size,
            help="System memory, such as 32GiB; with --os wsl2 the PC's, of which WSL2 has half.",
        ),
    ] = None
    ddr: Annotated[
        str | None,
        Option(
            metavar="KIND",
            help="Kind of system memory, such as DDR4-3200; 4xDDR4-3200 has four channels instead of two.",
        ),
    ] = None
    machine: Annotated[
        Path | None, Option(metavar="FILE", help="A recording that snugvl doctor --record made.")
    ] = None

    @property
    def described(self) -> bool:
        """Whether a machine is described, by its GPU."""
        return self.gpu is not None or self.vram is not None

    @property
    def here(self) -> bool:
        """Whether this machine is meant."""
        return not self.described and self.machine is None

    def __post_init__(self) -> None:
        details = {"--os": self.os, "--held": self.held, "--gpus": self.gpus, "--ram": self.ram}
        details["--ddr"] = self.ddr
        extra = next((option for option, value in details.items() if value is not None), None)
        if self.machine is not None and (self.described or extra):
            named = extra or ("--gpu" if self.gpu is not None else "--vram")
            raise typer.BadParameter(f"--machine replays a recording; {named} describes another machine")
        if extra and not self.described:
            raise typer.BadParameter(f"{extra} describes a machine: name its GPU too, with --gpu or --vram")


def machine_from(options: MachineChoice) -> Machine:
    """The machine that the options mean: this one, a described one, or a recorded one.

    Raises:
        typer.BadParameter: a description that can't be.
        InputError: a recording that can't be read.
    """
    if options.machine is not None:
        from snugvl.hardware.machine import replay

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
                ddr=options.ddr,
            )
        except InputError as error:  # whatever is wrong was said on the command line
            raise typer.BadParameter(str(error)) from None
    from snugvl.hardware.probe import probe

    return probe()


NUMBERS = {"int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER", "str": "TEXT"}


def meant(word: str, known: Sequence[str]) -> str | None:
    """The one of `known` that `word` misspells or abbreviates; None where none is near."""
    from difflib import get_close_matches

    begun = [name for name in known if len(word) > 2 and name.startswith(word)]
    near = begun[:1] or get_close_matches(word, known, n=1, cutoff=0.75)
    return near[0] if near else None


class _HelpFormatter(typer.Context.formatter_class):  # type: ignore[misc, valid-type]
    """Writes --help, on a narrow terminal, too: click's own lines have 50 columns at least."""

    width: int

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        import shutil  # which takes its time, and a start without --help needs it not

        super().__init__(indent_increment, width, max_width)
        self.width = min(self.width, max(shutil.get_terminal_size().columns, NARROWEST) - 2)

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        if self.width < 50:  # no room for two columns: what a name means stands below it
            rows, col_max = [(wrapped(name, self.width - 2, 6), text) for name, text in rows], 8
        super().write_dl(rows, col_max, col_spacing)


class _Context(typer.Context):
    formatter_class = _HelpFormatter


class _Read:
    """Common help of commands and groups: whole summaries, and ranges of numbers in words."""

    context_class: Any = _Context
    help: str | None
    params: list[Any]

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence, however long: it is wrapped where a cut one would end in dots."""
        first, stop, _ = " ".join((self.help or "").split("\n\n")[0].split()).partition(". ")
        return first + stop.strip()

    def _plainly(self) -> None:
        for parameter in self.params:
            kind = parameter.type
            if (
                parameter.metavar is None
                and kind.name in NUMBERS
                and not getattr(parameter, "is_flag", False)
            ):
                parameter.metavar = NUMBERS[kind.name]
            least, most = getattr(kind, "min", None), getattr(kind, "max", None)
            if least is not None:
                words = f"at least {least:g}" if most is None else f"{least:g} to {most:g}"
                kind._describe_range = lambda words=words: words


class Command(_Read, TyperCommand):
    """A typer command whose help has whole summaries, and ranges of numbers in words."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self._plainly()


class CommandGroup(_Read, TyperGroup):
    """A typer group of commands, with the same help as `Command`."""


DEFAULT_MODEL = "pocket"


def model_argument(text: str) -> Any:
    """The argument `MODEL`, whose help is `text`."""
    return Argument(metavar="MODEL", help=text, autocompletion=downloaded_models)


DownloadedModel = Annotated[str, model_argument("As `snugvl list` shows it.")]
_FILES = "folders, quoted globs ('photos/**/*.jpg'), or - for standard input."
Pictures = Annotated[list[str], Argument(metavar="IMAGE...", help=f"Files (PDFs too), {_FILES}")]
Images = Annotated[list[str], Argument(metavar="IMAGE...", help=f"Files (videos and PDFs too), {_FILES}")]
Recursive = Annotated[bool, Option("--recursive", "-r", help="Also take what is in folders of a folder.")]
Model = Annotated[
    str | None,
    Option(
        "--model",
        "-m",
        envvar="SNUGVL_MODEL",
        metavar="MODEL",
        autocompletion=downloaded_models,
        help="A folder or a Hub id; with --server, a name that it serves. Without: what `snugvl serve` runs "
        "on this machine, else the best that is downloaded and fits, else pocket.",
    ),
]


def server_option(text: str) -> Any:
    """The option `--server`, whose help is `text`."""
    return Option("--server", envvar="SNUGVL_SERVER", metavar="URL", callback=address, help=text)


Server = Annotated[str | None, server_option("Ask a running `snugvl serve` instead.")]
ApiKey = Annotated[str | None, Option(envvar="SNUGVL_API_KEY", metavar="KEY", help="API key of the server.")]
Backend = Annotated[
    Literal["auto", "native", "transformers"],
    Option(help="Which engine; auto: ours where it runs the model, else transformers."),
]
MaxTokens = Annotated[
    int | None, Option(min=1, help="Longest answer, in tokens; the default suits the task.")
]
Temperature = Annotated[
    float, Option(min=0.0, max=2.0, help="0: always the likeliest word; more: more variety.")
]
Seed = Annotated[int | None, Option(help="Makes answers at a --temperature above 0 repeatable.")]
Json = Annotated[bool, Option("--json", help="JSON Lines: one object per image.")]
Output = Annotated[
    Path | None, Option("--output", "-o", metavar="FILE", help="Write JSON Lines to a new file.")
]
Resume = Annotated[
    bool, Option("--resume", help="Continue the --output file: skip images that it has a result for.")
]
Quiet = Annotated[bool, Option("--quiet", help="Only errors on standard error.")]


DEFAULTS = {each.name: each.default for each in fields(LoadOptions)}
CHECKED: dict[str, Any] = {"device": device, "memory": size}  # values that are more than their types
HINTS = get_type_hints(LoadOptions)


def _spelled(name: str, row: OptionRow) -> Any:
    """A field of `LoadOptions` as typer takes it."""
    kind = str | None if name == "memory" else HINTS[name]
    yes = flag(name, True)
    both = DEFAULTS[name] is True or kind == bool | None
    return Annotated[
        kind,
        Option(
            f"{yes}/{flag(name, False)}" if both else yes,
            metavar=row.metavar,
            min=row.least,
            callback=CHECKED.get(name),
            help=row.help,
        ),
    ]


def load_options(command: str) -> dict[str, Any]:
    """The options of loading that a command has, by the field of `LoadOptions` that they set."""
    return {name: _spelled(name, row) for name, row in ROWS.items() if command in row.commands}


LOAD = {**load_options("load"), "backend": Backend}
SERVED = load_options("serve")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model of a command, and how to load it; or the server that has it.

    `model` is None where neither was given: `session.resolve` chooses, and `notes` say what and why.
    `pocket`: whether pocket or a copy of it answers, here or on the server: it learned drawings alone.
    """

    model: str | None
    server: str | None = None
    api_key: str | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    pocket: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        engine = self.load.backend
        if self.load.trust_remote_code and engine != "auto" and not rules_of(engine).runs_remote_code:
            raise typer.BadParameter(
                f"--trust-remote-code is not for {rules_of(engine).title}, which runs no checkpoint's code; "
                "say --backend transformers, or leave it out"
            )
        if self.server is None:
            return
        asked = self.load.said()
        asked.pop("max_pixels", None)  # a server takes it with each request
        if said := [flag(name, value) for name, value in asked.items()]:
            raise typer.BadParameter(
                f"{' and '.join(said)} can't be chosen for a model that a server has loaded "
                f"({self.server}); leave {'it' if len(said) == 1 else 'them'} out, or leave out --server"
            )

    @property
    def name(self) -> str:
        """The model's name, after `session.resolve`."""
        assert self.model is not None
        return self.model


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of generation."""

    max_tokens: MaxTokens = None
    temperature: Temperature = 0.0
    seed: Seed = None

    def sampling(self) -> SamplingParams:
        """The options as sampling parameters for the tasks."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)

    def chosen(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name: a run is resumed with the same only."""
        chosen: dict[str, Any] = {}
        if self.max_tokens is not None:
            chosen["max_tokens"] = self.max_tokens
        if self.temperature:
            chosen |= {"temperature": self.temperature, "seed": self.seed}
        return chosen


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """Options of where results go. `path` is a JSON Lines file."""

    json: bool
    path: Path | None
    resume: bool
    quiet: bool

    def __post_init__(self) -> None:
        if self.resume and self.path is None:
            raise typer.BadParameter("--resume continues a file: name it with --output")


def _choice(values: dict[str, Any]) -> ModelChoice:
    model, server, key = values.pop("model"), values.pop("server"), values.pop("api_key")
    return ModelChoice(model, server, key, LoadOptions(model or DEFAULT_MODEL, **values))


# What a parameter of each kind is spelled out to, and how its value is made; fields of others are options.
CHOICE: dict[str, Any] = {"model": Model, "server": Server, "api_key": ApiKey, **LOAD}
OUTPUT: dict[str, Any] = {"json": Json, "output": Output, "resume": Resume, "quiet": Quiet}
GROUPS: dict[type, tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]] = {
    ModelChoice: (CHOICE, _choice),
    OutputChoice: (OUTPUT, lambda values: OutputChoice(*values.values())),
}
CONTEXT = "invocation"  # of a command that takes none itself
KEYWORD = inspect.Parameter.KEYWORD_ONLY
PLAIN = {"model": None, "server": None, "api_key": None, "json": False, "resume": False, "quiet": False}


def _without_file(values: dict[str, Any], context: typer.Context) -> None:
    """Drop the configuration file's options of loading where a server has loaded its model already."""
    if not (values.get("server") or values.get("attach")):
        return
    for name in values.keys() & ({*LOAD, *SERVED} - {"max_pixels"}):
        if _source(context, name) == "DEFAULT_MAP":
            values[name] = DEFAULTS[name]
    # A model that is said every time is none of the server's that is said now.
    often = {"DEFAULT_MAP", "ENVIRONMENT"}
    if _source(context, "model") in often and _source(context, "server") == "COMMANDLINE":
        values["model"] = None


def _made(kind: type, values: dict[str, Any]) -> Any:
    return kind(**values)


def _source(context: typer.Context, name: str) -> str:
    """Where an option's value came from: COMMANDLINE, ENVIRONMENT, DEFAULT_MAP or DEFAULT."""
    source = context.get_parameter_source(name)
    return source.name if source is not None else ""


def grouped(*load: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: parameters that are groups become their options.

    `load`: what a parameter `load: LoadOptions` is spelled out to; its model is the command's own.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        groups = {**GROUPS, LoadOptions: (load[0] if load else LOAD, lambda values: LoadOptions(**values))}
        spelled: list[inspect.Parameter] = []
        members: dict[str, type] = {}
        its_context = next((name for name, kind in hints.items() if kind is typer.Context), CONTEXT)
        for name, parameter in inspect.signature(command).parameters.items():
            kind = hints[name]
            defaults = DEFAULTS | PLAIN
            if isinstance(kind, type) and is_dataclass(kind) and kind not in groups:
                groups[kind] = (get_type_hints(kind, include_extras=True), partial(_made, kind))
                defaults = {each.name: each.default for each in fields(kind)}
            if kind not in groups:
                spelled.append(parameter.replace(annotation=kind, kind=KEYWORD))
                continue
            members[name] = kind
            for option, annotation in groups[kind][0].items():
                default = defaults.get(option)
                spelled.append(inspect.Parameter(option, KEYWORD, annotation=annotation, default=default))

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            context = values.pop(CONTEXT) if its_context == CONTEXT else values[its_context]
            _without_file(values, context)
            try:
                for name, kind in members.items():
                    options, make = groups[kind]
                    values[name] = make({option: values.pop(option) for option in options})
            except (RequestError, InputError) as error:  # of a value alone, whatever the machine
                raise typer.BadParameter(str(error)) from None
            return command(**values)

        if its_context == CONTEXT:
            spelled.append(inspect.Parameter(CONTEXT, KEYWORD, annotation=typer.Context))
        run.__signature__ = inspect.Signature(spelled)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in spelled}
        return run

    return decorate
