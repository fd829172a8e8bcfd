"""`snugvl config`, and its TOML file of options that hold for every command line.

    # $XDG_CONFIG_HOME/snugvl/config.toml
    model = "Qwen/Qwen3-VL-4B-Instruct-FP8"    # for every command that has the option
    [serve]                                    # for one command
    port = 8080

Keys are names of options without their dashes. The command line comes first, then the environment, then this
file. An unknown key, or a value of the wrong kind, is refused by line and key.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer import Argument

from snugvl.cli.options import Command, CommandGroup, meant
from snugvl.cli.terminal import plainly, printable, say, write
from snugvl.core.folders import config_folder, read_small, write_whole
from snugvl.errors import InputError, SnugvlError

MAX_BYTES: Final = 2**16
MAX_LINE: Final = 2048  # characters: tomllib takes time with the square of a key's dotted parts
NEVER: Final = {"help", "version", "install-completion", "show-completion", "yes", "force"}
# `model` is an option of tasks, but an argument of these; `plan` and `pull` mean another one each time.
MODEL_ARGUMENT: Final = ("serve",)
UNDO: Final = "correct it with snugvl config set, or remove it with snugvl config unset"
_TABLE: Final = re.compile(r"\s*\[\s*([\w-]+)\s*\]")
_KEY: Final = re.compile(r"\s*([\w-]+)\s*=")

app = typer.Typer(
    cls=CommandGroup, help="Keep the options that you give every time (model, memory, port …) in a TOML file."
)
Key = Annotated[str, Argument(metavar="KEY", help="An option, as memory; of one command, serve.port.")]


@app.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")


def path() -> Path:
    """The file's path: below `$XDG_CONFIG_HOME`, `%APPDATA%` on Windows, else below `~/.config`."""
    return config_folder() / "config.toml"


def defaults(context: typer.Context) -> dict[str, Any] | None:
    """The file as values of each command's parameters, or None without a file.

    Raises:
        InputError: a line can't be read, a key is not an option, or a value is of the wrong kind.
    """
    text = _text()
    if text is None:
        return None
    return {command: values for command, values in _checked(text, context).items() if values}


def blame(words: Sequence[str], message: str) -> str:
    """Addition to an error message about a value of the file: "; KEY is set in …", and how to undo that.

    Empty where the message names no value of the file, or the option is among `words`, the command line."""
    try:
        values = _parsed(_text() or "")
    except (InputError, OSError):
        return ""
    command = next((word for word in words if not word.startswith("-")), "")
    if command == "config" or str(path()) in message:  # it says so, or the file is being mended
        return ""
    own = values.get(command)
    said = {key: value for key, value in values.items() if not isinstance(value, dict)}
    keys = {key: key for key in said}
    if isinstance(own, dict):
        said |= own
        keys |= {key: f"{command}.{key}" for key in own}
    for key, value in said.items():
        typed = any(word.split("=")[0] == f"--{key}" for word in words)
        names = (f"--{key}", *(str(each) for each in (value if isinstance(value, list) else [value])))
        spoken = any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message) for name in names if name)
        if spoken and not typed and not isinstance(value, bool):
            return f"; {key} is set in {path()} (snugvl config unset {keys[key]})"
    return ""


@app.command("path", cls=Command)
def show_path() -> None:
    """Print where the file is, or would be."""
    write(f"{path()}\n")


@app.command("show", cls=Command)
def show() -> None:
    """Print the file, API keys included."""
    text = _text()
    if text is None:
        say(f"{path()} doesn't exist yet; write to it with: snugvl config set KEY VALUE")
        return
    write(printable(text if text.endswith("\n") or not text else text + "\n"))


@app.command("get", cls=Command)
def get(key: Key) -> None:
    """Print the value of a key."""
    table, name = _split(key)
    values = _parsed(_text() or "")
    own = values.get(table) if table else values
    found = own.get(name) if isinstance(own, dict) else None
    if found is None or isinstance(found, dict):
        raise InputError(f"{key} is not set in {path()}")
    write(printable(str(found).lower() if isinstance(found, bool) else str(found)) + "\n")


@app.command("set", cls=Command)
def set_(
    context: typer.Context,
    key: Key,
    value: Annotated[
        str | None, Argument(metavar="VALUE", help="Text, a number, true or false; or KEY=VALUE.")
    ] = None,
) -> None:
    """Set a key."""
    if value is None:
        key, equals, value = key.partition("=")
        if not equals:
            raise typer.BadParameter(f"the value is missing: snugvl config set {key} VALUE")
    table, name = _split(key)
    try:
        _checked(_with("", table, name, _toml(value)), context)
    except InputError as error:  # who types a key knows of no line
        raise InputError(re.sub(rf"^.*?, line \S+: |; remove it$|; {UNDO}$", "", str(error))) from None
    _write(_with(_text() or "", table, name, _toml(value)), context)
    shown = key if name.endswith("api-key") else f"{key} = {_toml(value)}"
    say(printable(f"{shown} is set in {path()}"))


@app.command("unset", cls=Command)
def unset(context: typer.Context, key: Key) -> None:
    """Remove a key."""
    table, name = _split(key)
    text = _text() or ""
    number = _lines(text).get((table, name))
    if number is None:
        raise InputError(f"{key} is not set in {path()}")
    lines = text.splitlines(keepends=True)
    del lines[number - 1]
    _write("".join(lines), context)
    say(f"{key} is removed from {path()}")


def _split(key: str) -> tuple[str, str]:
    """The table, empty for all commands, and the name of a key."""
    table, _, name = key.rpartition(".")
    if not re.fullmatch(r"[\w-]+", name) or (table and not re.fullmatch(r"[\w-]+", table)):
        raise InputError(f"{key!r} is not a key; give an option as memory, or of one command as serve.port")
    return table, name


def _text() -> str | None:
    file = path()
    try:
        text = read_small(file, MAX_BYTES).decode("utf-8-sig")  # Windows marks its files
    except (FileNotFoundError, NotADirectoryError):  # XDG_CONFIG_HOME=/dev/null: there is to be none
        return None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text; write it anew, or remove it") from None
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise InputError(f"{file}: {error.strerror}; it should be a few lines") from None
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > MAX_LINE:
            raise InputError(
                f"{file}, line {number}: it has {len(line):,} characters, at most {MAX_LINE:,} are read"
            )
    return text


def _parsed(text: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path()}: {error}; correct that line, or remove it") from None
    except RecursionError:
        raise InputError(f"{path()}: its lists or tables are nested too deeply; remove that line") from None


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Line numbers, from 1, by table and key."""
    found, table = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = match[1]
            found[table, ""] = number
        elif match := _KEY.match(line):
            found[table, match[1]] = number
    return found


def _checked(text: str, context: typer.Context) -> dict[str, dict[str, Any]]:
    """The values by command and parameter."""
    commands = {name: _options(name, command) for name, command in _commands(context)}
    lines = _lines(text)
    given: dict[str, dict[str, Any]] = {name: {} for name in commands}

    def where(table: str, key: str) -> str:
        return f"{path()}, line {lines.get((table, key), '?')}"

    for key, value in _parsed(text).items():
        if isinstance(value, dict):
            if key not in commands:
                raise InputError(f"{where(key, '')}: [{key}] is not a command of snugvl; remove it")
            for name, inner in value.items():
                if name not in commands[key]:
                    raise InputError(
                        f"{where(key, name)}: {name} is not an option of snugvl {key}"
                        f"{_near(name, list(commands[key]))}; remove it"
                    )
                parameter = commands[key][name]
                given[key][parameter.name] = _value(context, parameter, inner, f"{where(key, name)}: {name}")
            continue
        having = [command for command, known in commands.items() if key in known]
        if key in commands:
            raise InputError(f"{where(key, '')}: {key} is a command; write its options below a line [{key}]")
        if not having:
            near = _near(key, [name for known in commands.values() for name in known])
            raise InputError(f"{where('', key)}: {key} is not an option of any command{near}; remove it")
        for command in having:
            parameter = commands[command][key]
            checked = _value(context, parameter, value, f"{where('', key)}: {key}")
            given[command].setdefault(parameter.name, checked)
    return given


def _near(key: str, known: Sequence[str]) -> str:
    """ "; did you mean KEY?" for the nearest key; empty where none is near."""
    near = meant(key, known)
    return f" (did you mean {near}?)" if near else ""


def _commands(context: typer.Context) -> Iterator[tuple[str, Any]]:
    """Every command of the program but this one."""
    root: Any = context.find_root().command
    for name in root.list_commands(context):
        if name != "config":
            yield name, root.get_command(context, name)


def _options(name: str, command: Any) -> dict[str, Any]:
    """A command's parameters by the names of their options."""
    found = {}
    for parameter in command.params:
        for option in parameter.opts:
            key = option.removeprefix("--")
            if (option.startswith("--") and key not in NEVER) or (name in MODEL_ARGUMENT and key == "model"):
                found[key] = parameter
    return found


def _value(context: typer.Context, parameter: Any, value: Any, where: str) -> Any:
    """A value as the option takes it."""
    if getattr(parameter, "is_flag", False) != isinstance(value, bool):
        wanted = "true or false" if getattr(parameter, "is_flag", False) else "text or a number"
        raise InputError(f"{where} is {value!r}; it must be {wanted}")
    several = parameter.multiple if hasattr(parameter, "multiple") else False
    values = value if isinstance(value, list) else [value]
    if (isinstance(value, list) and not several) or not all(isinstance(v, str | int | float) for v in values):
        raise InputError(f"{where} is {value!r}; it must be one text or number")
    value = [str(each) for each in values] if several else value if isinstance(value, bool) else str(value)
    try:
        parameter.process_value(context, value)
    except (typer.BadParameter, SnugvlError) as error:
        said = error.message if isinstance(error, typer.BadParameter) else str(error)
        raise InputError(f"{where}: {plainly(said)}; {UNDO}") from None
    return value


def _toml(value: str) -> str:
    """`value` as TOML: a number or truth as it is, anything else as a string."""
    import json

    if re.fullmatch(r"true|false|[+-]?\d+(\.\d+)?", value):
        return value
    if not value.isprintable():
        raise InputError(f"{value!r} has characters that can't be printed; leave them out")
    return json.dumps(value, ensure_ascii=False)


def _with(text: str, table: str, name: str, value: str) -> str:
    """The text with one key more, or another value of it; comments stay."""
    lines = [line + "\n" for line in text.splitlines()]
    numbers, line = _lines(text), f"{name} = {value}\n"
    if (table, name) in numbers:
        lines[numbers[table, name] - 1] = line
    elif table:
        if (table, "") not in numbers:
            return "".join([*lines, f"[{table}]\n", line])
        lines.insert(numbers[table, ""], line)
    else:
        first = min((number for (_, key), number in numbers.items() if not key), default=len(lines) + 1)
        lines.insert(first - 1, line)
    return "".join(lines)


def _write(text: str, context: typer.Context) -> None:
    """Write a valid text to the file, which only the user can read, as it may hold API keys."""
    _checked(text, context)
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)

    def write(draft: Path) -> None:
        draft.touch(mode=0o600)
        draft.write_text(text, encoding="utf-8")

    write_whole(file, write)
