"""What `snugvl serve` has beside the options of loading: the server, whatever runs behind it; a vLLM of ours
or of others; and what of all that doesn't go together, refused by name."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from snugvl.cli import values
from snugvl.cli.values import downloaded_models
from snugvl.core.options import flag, typed
from snugvl.planner.engines import beyond, engines_with, owners, rules_of

if TYPE_CHECKING:
    from snugvl.core.options import Engine, LoadOptions

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        envvar="SNUGVL_MODEL",
        autocompletion=downloaded_models,
        help="A folder, a Hub id or pocket; without one the best that is downloaded and fits.",
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", metavar="NAME", help="What requests call the model; repeatable."),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key", metavar="KEY", help="A key that requests may use; repeatable. Also SNUGVL_API_KEY."
    ),
]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="FILE", help="More keys, one a line; # comments.")
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin", metavar="ORIGIN", help="A web page's address that may ask, or '*'; repeatable."
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes any free one.")
]
NoAuth = Annotated[
    bool, typer.Option("--no-auth", help="Ask nobody for a key, also on addresses that other machines reach.")
]
MaxConcurrent = Annotated[
    int,
    typer.Option("--max-concurrent", min=1, help="Requests at once, waiting ones included; then 429."),
]
Deadline = Annotated[
    float, typer.Option("--deadline", min=0, help="Seconds a request may take in all; 0 for no limit.")
]
Drain = Annotated[
    float, typer.Option("--drain", min=0, help="Seconds that running requests may still take after Ctrl+C.")
]
MaxBody = Annotated[int, typer.Option("--max-body", min=1, help="Most MiB that one request may have.")]
AllowLocalMedia = Annotated[
    Path | None,
    typer.Option("--allow-local-media", metavar="DIR", help="Let file: URLs read below this folder."),
]
AllowPrivateMedia = Annotated[
    bool, typer.Option("--allow-private-media", help="Let picture URLs point to private addresses.")
]
AllowedMediaDomains = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-media-domains",
        metavar="HOST",
        help="Fetch pictures from this host alone; repeatable; 'none': from nobody.",
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option("--log-level", help="debug shows polls of /health, /memory and /metrics, too."),
]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Log what people ask and what they get.")]
KeyRequestsPerMinute = Annotated[
    int | None, typer.Option("--key-requests-per-minute", min=1, help="Requests a minute of each API key.")
]
KeyConcurrent = Annotated[
    int | None, typer.Option("--key-concurrent", min=1, help="Requests at once of each API key.")
]
VllmCommand = Annotated[
    str | None,
    typer.Option(
        "--vllm-command",
        metavar="WORDS",
        help="The command to run instead of vllm, such as '/opt/venv/bin/vllm'.",
    ),
]
Attach = Annotated[
    str | None,
    typer.Option(
        "--attach",
        metavar="URL",
        callback=values.address,
        help="Use a vLLM that runs already, or with --backend llamacpp a llama-server.",
    ),
]
AttachKey = Annotated[
    str | None, typer.Option("--attach-api-key", metavar="KEY", help="Key of the server to attach to.")
]
LlamacppCommand = Annotated[
    str | None,
    typer.Option(
        "--llamacpp-command",
        metavar="WORDS",
        help="The command to run instead of llama-server, such as '/opt/llama.cpp/llama-server'.",
    ),
]
NoRetry = Annotated[
    bool,
    typer.Option("--no-retry", help="Don't plan again and retry once when a vLLM or llama.cpp fails."),
]
SleepAfter = Annotated[
    float | None,
    typer.Option(
        "--sleep-after",
        metavar="SECONDS",
        help="vLLM gives GPU memory back after so long without a request; the next one wakes it.",
    ),
]
NOT_SERVERS = ("dtype", "max_waiting")
SERVERS = {"vllm": "vLLM", "llamacpp": "llama.cpp"}  # engines that are servers of other programs


@dataclass(frozen=True, slots=True)
class ChildOptions:
    """What only engines have that are servers of other programs: vLLM and llama.cpp.

    Attributes:
        vllm_line, llamacpp_line: the words that stand for vllm and llama-server.
        attach: URL of a server that runs.
        sleep_after_s: seconds without a request after which vLLM's memory is given back.
    """

    vllm_line: str | None = None
    llamacpp_line: str | None = None
    attach: str | None = None
    attach_api_key: str | None = None
    retry: bool = True
    sleep_after_s: float | None = None

    @property
    def vllm_command(self) -> tuple[str, ...]:
        """The words that stand for vllm."""
        return _words("--vllm-command", self.vllm_line)

    @property
    def llamacpp_command(self) -> tuple[str, ...]:
        """The words that stand for llama-server."""
        return _words("--llamacpp-command", self.llamacpp_line)

    def said(self) -> dict[str, tuple[str, ...]]:
        """The options that were given, `--attach` left out, and the engines that have them."""
        given = {
            "--vllm-command": (self.vllm_line is not None, ("vllm",)),
            "--llamacpp-command": (self.llamacpp_line is not None, ("llamacpp",)),
            "--no-retry": (not self.retry, ("vllm", "llamacpp")),
            "--sleep-after": (self.sleep_after_s is not None, ("vllm",)),
        }
        return {name: engines for name, (there, engines) in given.items() if there}


def _words(option: str, line: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(line or ""))
    except ValueError as error:
        raise typer.BadParameter(f"{option} {line!r}: {error}") from None


def check(load: LoadOptions, child: ChildOptions) -> None:
    """Refuse what goes together under no plan.

    Raises:
        typer.BadParameter: names the options and the way out.
    """
    if child.attach_api_key is not None and child.attach is None:
        raise typer.BadParameter("--attach-api-key is the key of a server: name it with --attach")
    if child.llamacpp_line is not None and not child.llamacpp_command:
        raise typer.BadParameter(
            "--llamacpp-command is empty; name a program, such as /opt/llama.cpp/llama-server"
        )
    if child.vllm_line is not None and not child.vllm_command:
        raise typer.BadParameter("--vllm-command is empty; name a program, such as /opt/venv/bin/vllm")
    if load.language_only and load.images:
        raise typer.BadParameter(
            f"--language-only serves no pictures, --images {load.images} wants some; leave one out"
        )
    if load.language_only and load.tower == "streamed":
        raise typer.BadParameter("--language-only leaves no vision tower to stream; leave --tower out")
    if child.attach is None:
        if load.backend != "auto":
            check_engine(load, child, load.backend, f"--backend {load.backend}")
        return
    if load.backend not in ("auto", *SERVERS):
        raise typer.BadParameter(f"--attach takes a vLLM or a llama.cpp server, not --backend {load.backend}")
    backend = "vllm" if load.backend == "auto" else load.backend
    name = SERVERS[backend]
    asked = {name: value for name, value in load.said().items() if name != "backend"}
    if said := [*child.said(), *(flag(name, value) for name, value in asked.items())]:
        raise typer.BadParameter(
            f"{' and '.join(said)} can't be chosen for a {name} that runs already (--attach); leave "
            f"{_it(said)} out, or start {name} with snugvl: --backend {backend}"
        )


def check_engine(load: LoadOptions, child: ChildOptions, engine: Engine, why: str) -> None:
    """Refuse what an engine doesn't have. `why`: how it came to be this engine.

    Raises:
        typer.BadParameter: names the options and the way out.
    """
    asked = load.said()
    others = {name: having for name, having in child.said().items() if engine not in having}
    if others:
        said = list(others)
        able = [each for each in SERVERS if all(each in having for having in others.values())]
        if not able:  # no engine has them all
            said, able = said[:1], list(others[said[0]])
        whose = " and ".join(f"{SERVERS[each]}'s" for each in able)
        raise typer.BadParameter(
            f"{' and '.join(said)} {_is(said)} {whose} alone ({why}); say --backend {' or '.join(able)}, or "
            f"leave {_it(said)} out"
        )
    rules = rules_of(engine)
    if ours := beyond(engine, asked):
        said = [" ".join(typed(name, value)) for name, value in ours.items()]
        raise typer.BadParameter(
            f"{' and '.join(said)} {_is(said)} for {owners(ours)} alone ({why}); say --backend "
            f"{engines_with(ours)[0]}, or leave {_it(said)} out"
        )
    name = SERVERS.get(engine, "")
    if name and (said := [flag(each, asked[each]) for each in NOT_SERVERS if each in asked]):
        raise typer.BadParameter(
            f"{' and '.join(said)} {_is(said)} not for {name} ({why}); leave {_it(said)} out"
        )
    if load.trust_remote_code and not rules.runs_remote_code:
        what = name or "our own engine"
        raise typer.BadParameter(
            f"--trust-remote-code is not for {what}, which runs no checkpoint's code ({why}); "
            "say --backend transformers or vllm, or leave it out"
        )


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
