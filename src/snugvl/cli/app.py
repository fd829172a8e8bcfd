"""The `snugvl` command: its subcommands, and how every error reaches the user.

One line on standard error and the exit code of the exception tree (`snugvl.errors`); a traceback only with
SNUGVL_DEBUG=1.
"""

import gc
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from traceback import walk_tb
from typing import Annotated, Final

import typer
from typer import Option

from snugvl.backends.process.launch import Launched
from snugvl.cli import (
    bench,
    chat,
    compare,
    config,
    doctor,
    models,
    plan,
    quantize,
    running,
    serve,
    sources,
    tasks,
    top,
)
from snugvl.cli.options import Command, CommandGroup, meant
from snugvl.cli.running import explained
from snugvl.cli.terminal import INTERRUPTED, ClosedPipe, plainly, say, trace, warnings_said, write
from snugvl.core.folders import check_current_folder, moved
from snugvl.errors import DoesNotFit, RequestTooLarge, SnugvlError, torn
from snugvl.version import __version__

CLOSED_PIPE = 141  # what a shell reports for a program that SIGPIPE ended, as `yes | head` does

app = typer.Typer(
    name="snugvl",
    cls=CommandGroup,
    help="See what is in pictures, with a vision-language model on this machine.",
    epilog="Exit codes: 0 done, 2 usage, 3 input, 4 model files, 5 memory, 6 the model's answer, "
    "7 some images or requests of several failed, 130 interrupted, 1 anything else.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("caption", cls=Command)(tasks.caption)
app.command("ask", cls=Command)(tasks.ask)
app.command("scene", cls=Command)(tasks.scene)
app.command("detect", cls=Command)(tasks.detect)
app.command("chat", cls=Command)(chat.chat)
app.command("top", cls=Command)(top.top)
app.command("doctor", cls=Command)(doctor.doctor)
app.command("plan", cls=Command)(plan.plan)
app.command("pull", cls=Command)(models.pull)
app.command("list", cls=Command)(models.list_models)
app.command("rm", cls=Command)(models.rm)
app.command("serve", cls=Command)(serve.serve)
app.command("ps", cls=Command)(running.ps)
app.command("bench", cls=Command)(bench.bench)
app.command("compare", cls=Command)(compare.compare)
app.command("quantize", cls=Command)(quantize.quantize)
app.add_typer(config.app, name="config")


def _print_version(value: bool) -> None:
    if value:
        write(f"snugvl {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")
    elif context.invoked_subcommand != "config":  # which must run to mend a bad file
        check_current_folder()
        context.default_map = config.defaults(context)


def run(args: Sequence[str] | None = None, launched: Launched | None = None) -> int:
    """Run one command line (that of the process by default); its exit code.

    `launched`: an engine's process that was begun ahead; ended here where the command didn't take it.
    """
    try:
        return _run(args, launched)
    except ClosedPipe:
        return CLOSED_PIPE


def _run(args: Sequence[str] | None, launched: Launched | None) -> int:
    words = sys.argv[1:] if args is None else args
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a path may hold bytes that are not text in this locale
            stream.reconfigure(errors="replace")
    try:
        with launched or nullcontext(), warnings_said():
            code = app(args=args, prog_name="snugvl", standalone_mode=False, obj=launched)
        write("")
        serves = words[:1] == ["serve"]  # which it does all the same
        if not code and not serves and getattr(sys.stdout, "lost", False):
            say("standard output is closed (>&-), so nothing was printed; use >/dev/null to print nothing")
            return 1
    except typer.TyperException as error:
        _say_usage(error, words)
        return error.exit_code
    except SnugvlError as error:
        say(f"{explained(_in_options(error, words))}{config.blame(words, str(error))}")
        trace(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort) as error:
        if why := torn(error.__cause__):  # an EOFError, which Typer takes for Ctrl+D
            say(why)
            return 1
        say("interrupted")
        return INTERRUPTED
    except ClosedPipe:
        raise
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # what Typer makes of one
            raise ClosedPipe from None
        raise
    except Exception as error:
        if isinstance(error, OSError) and _is_typers(error):
            if isinstance(error, BrokenPipeError):
                raise ClosedPipe from None
            error.filename = "standard output"
        said, code = _failure(error)
        say(said)
        trace(error)
        return code
    return code if isinstance(code, int) else 0


# What the system refuses a process, as Python and torch say it: the exit code, and what to do.
_REFUSED: Final = (
    (
        "MemoryError|annot allocate memory|can't allocate memory|failed to map segment",
        DoesNotFit.exit_code,
        "the system gives this process no more memory; close other programs, take a smaller model, "
        "or raise the limit (ulimit -v, or the container's)",
    ),
    (
        "can't start new thread",
        1,
        "the system lets this process start no more threads; raise the limit (ulimit -u, or the container's)",
    ),
    (
        "Too many open files",
        1,
        "the system lets this process open no more files; raise ulimit -n",
    ),
)


def _is_typers(error: OSError) -> bool:
    """Whether Typer's own printing failed: its help, and what shells complete with."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith("typer.")


def _failure(error: Exception) -> tuple[str, int]:
    """(what is said, exit code) of an error that isn't ours."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__context__) is not None:
        chain.append(cause)
    if why := torn(chain[0]):
        return why, 1
    causes = " ".join(f"{type(each).__name__}: {each}" for each in chain)
    for pattern, code, why in _REFUSED:
        if re.search(pattern, causes):
            return why, code
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}{moved(error)}", 1
    said = f"unexpected {type(error).__name__}: {error}"
    return f"{said}; please report it with the traceback that SNUGVL_DEBUG=1 shows", 1


def main(launched: Launched | None = None) -> None:
    """The command of this process, and its end; `launched`: see `run`."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)  # a plan makes many small objects, of which nearly all stay to its end
    gc.enable()
    sys.exit(run(launched=launched))


# What other programs call it, by the group that is asked.
_ELSEWHERE: Final = {
    "snugvl": {
        "models": "list", "ls": "list", "run": "chat", "start": "serve", "status": "ps", "download": "pull",
        "remove": "rm", "delete": "rm", "describe": "caption", "benchmark": "bench", "find": "detect",
        "help": "--help", "version": "--version",
    },
    "snugvl config": {
        "list": "show", "ls": "show", "cat": "show", "edit": "path", "add": "set", "rm": "unset",
        "remove": "unset", "delete": "unset", "help": "--help",
    },
}  # fmt: skip
_STOPS: Final = ("stop", "kill", "shutdown", "quit", "exit", "restart", "down", "unload")
_STOPPED: Final = (
    "A server ends with Ctrl+C where it runs, with kill PID in the background (snugvl ps shows the PID), and "
    "as a service of systemd with systemctl stop"
)
_STRAY_SERVER: Final = re.compile(r"too many arguments: (https?://\S+)$")
_NO_COMMAND: Final = re.compile(r"No such command '(.*?)'\.?")


def _in_options(error: SnugvlError, words: Sequence[str]) -> SnugvlError:
    """The error with the names of options where it names a request's fields."""
    if isinstance(error, RequestTooLarge):
        text = str(error).replace("(max_pixels)", "(--max-pixels)")
        given = any(word.split("=")[0] == "--context" for word in words)
        error.args = (f"{text}, or give a larger --context" if given else text, *error.args[1:])
    return error


def _say_usage(error: typer.TyperException, words: Sequence[str]) -> None:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "snugvl"
    message = plainly(error.format_message())
    found = _NO_COMMAND.match(message)
    if found and found[1] in (ours := _ELSEWHERE.get(command, {})):
        message = f"{found[0].rstrip('.')}. Did you mean {ours[found[1]]!r}?"
    elif found and command == "snugvl" and found[1] in _STOPS:
        message = f"{found[0].rstrip('.')}. {_STOPPED}"
    elif found and command == "snugvl" and sources.pictured(found[1]):
        message = f"{found[0].rstrip('.')}; to describe that: {shlex.join(['snugvl', 'caption', found[1]])}"
    elif option := getattr(error, "option_name", None) if hasattr(error, "possibilities") else None:
        known = [name.lstrip("-") for name in getattr(error, "possibilities", None) or []]
        word = next((each for each in words if each.startswith(option)), option)
        if not word.startswith("--") and context:  # of `-gpu` the parser names `-g` alone
            known = [name[2:] for each in context.command.params for name in each.opts if name[:2] == "--"]
        near = meant(word.partition("=")[0].lstrip("-"), known)
        message = f"No such option: {option}" + (f". Did you mean --{near}?" if near else "")
        if sources.pictured(word):
            message = f"No such option: {word}; a file of that name is given as ./{word}"
    elif url := _STRAY_SERVER.match(message):
        message = f"{message}; a server is named with --server {url[1]}"
    say(f"{message}{config.blame(words, message)} (see {command} --help)")
