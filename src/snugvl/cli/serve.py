"""`snugvl serve`: its options, with combinations that contradict one another refused by name.

Beside the options of loading there are those of the server, for any engine, and those of a vLLM or llama.cpp
that snugvl starts or attaches to.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from snugvl.cli import options
from snugvl.cli.options import downloaded_models
from snugvl.cli.terminal import say
from snugvl.core.folders import expanded
from snugvl.core.options import LoadOptions, flag
from snugvl.core.sizes import MIB
from snugvl.errors import RequestError
from snugvl.planner.engines import refuse_lacking, rules_of

if TYPE_CHECKING:
    from concurrent.futures import Future
    from socket import socket

    from snugvl.backends.process.launch import Launched
    from snugvl.core.options import Engine
    from snugvl.core.service import EngineService
    from snugvl.hardware.machine import Machine
    from snugvl.planner.report.document import SavedPlan
    from snugvl.server.settings import ServerSettings

Model = Annotated[
    str | None,
    Argument(
        metavar="[MODEL]",
        envvar="SNUGVL_MODEL",
        autocompletion=downloaded_models,
        help="A folder, a Hub id or pocket; without one the best that is downloaded and fits.",
    ),
]
Names = Annotated[
    list[str] | None,
    Option("--served-model-name", metavar="NAME", help="What requests call the model; repeatable."),
]
Keys = Annotated[
    list[str] | None,
    Option("--api-key", metavar="KEY", help="A key that requests may use; repeatable. Also SNUGVL_API_KEY."),
]
KeyFile = Annotated[
    Path | None, Option("--api-key-file", metavar="FILE", help="More keys, one a line; # comments.")
]
AllowOrigin = Annotated[
    list[str] | None, Option(metavar="ORIGIN", help="A web page's address that may ask, or '*'; repeatable.")
]
Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")]
NoAuth = Annotated[
    bool, Option("--no-auth", help="Ask for no key, also on addresses that other machines reach.")
]
MaxConcurrent = Annotated[int, Option(min=1, help="Requests at once, waiting ones included; then 429.")]
Deadline = Annotated[float, Option(min=0, help="Seconds a request may take in all; 0 for no limit.")]
Drain = Annotated[float, Option(min=0, help="Seconds that running requests may still take after Ctrl+C.")]
MaxBody = Annotated[int, Option(min=1, help="Most MiB that one request may have.")]
AllowLocalMedia = Annotated[Path | None, Option(metavar="DIR", help="Let file: URLs read below this folder.")]
AllowPrivateMedia = Annotated[
    bool, Option("--allow-private-media", help="Let picture URLs point to private addresses.")
]
AllowedMediaDomains = Annotated[
    list[str] | None,
    Option(metavar="HOST", help="Fetch pictures from this host alone; repeatable; 'none': from no host."),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    Option(help="debug also shows polls of /health, /memory and /metrics."),
]
LogPrompts = Annotated[bool, Option("--log-prompts", help="Log what people ask and what they get.")]
KeyRequestsPerMinute = Annotated[int | None, Option(min=1, help="Requests a minute of each API key.")]
KeyConcurrent = Annotated[int | None, Option(min=1, help="Requests at once of each API key.")]
NOT_SERVERS = ("dtype", "max_waiting")
SERVERS = {"vllm": "vLLM", "llamacpp": "llama.cpp"}  # engines that are servers of other programs


@dataclass(frozen=True, slots=True)
class ChildOptions:
    """Options of engines that are servers of other programs alone: vLLM and llama.cpp."""

    vllm_command: Annotated[
        str | None,
        Option(metavar="WORDS", help="The command to run instead of vllm, such as '/opt/venv/bin/vllm'."),
    ] = None
    llamacpp_command: Annotated[
        str | None,
        Option(
            metavar="WORDS",
            help="The command to run instead of llama-server, such as '/opt/llama.cpp/llama-server'.",
        ),
    ] = None
    no_retry: Annotated[
        bool, Option("--no-retry", help="Don't plan again and retry once when a vLLM or llama.cpp fails.")
    ] = False
    sleep_after: Annotated[
        float | None,
        Option(
            metavar="SECONDS",
            help="vLLM frees GPU memory after so many seconds without a request; the next one wakes it.",
        ),
    ] = None
    attach: Annotated[
        str | None,
        Option(
            metavar="URL",
            callback=options.address,
            help="Use a vLLM that runs already, or with --backend llamacpp a llama-server.",
        ),
    ] = None
    attach_api_key: Annotated[str | None, Option(metavar="KEY", help="Key of the server to attach to.")] = (
        None
    )

    @property
    def vllm_words(self) -> tuple[str, ...]:
        """The words of the command that starts vLLM."""
        return _words("--vllm-command", self.vllm_command)

    @property
    def llamacpp_words(self) -> tuple[str, ...]:
        """The words of the command that starts llama-server."""
        return _words("--llamacpp-command", self.llamacpp_command)

    def said(self) -> dict[str, tuple[str, ...]]:
        """The options that were given, `--attach` left out, and the engines that have them."""
        given = {
            "--vllm-command": (self.vllm_command is not None, ("vllm",)),
            "--llamacpp-command": (self.llamacpp_command is not None, ("llamacpp",)),
            "--no-retry": (self.no_retry, ("vllm", "llamacpp")),
            "--sleep-after": (self.sleep_after is not None, ("vllm",)),
        }
        return {name: engines for name, (there, engines) in given.items() if there}


def _words(option: str, line: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(line or ""))
    except ValueError as error:
        raise typer.BadParameter(f"{option} {line!r}: {error}") from None


def check(load: LoadOptions, child: ChildOptions) -> None:
    """Refuse options that no plan can have together.

    Raises:
        typer.BadParameter: names the options and the way out.
    """
    if child.attach_api_key is not None and child.attach is None:
        raise typer.BadParameter("--attach-api-key is the key of a server: name it with --attach")
    if child.llamacpp_command is not None and not child.llamacpp_words:
        raise typer.BadParameter(
            "--llamacpp-command is empty; name a program, such as /opt/llama.cpp/llama-server"
        )
    if child.vllm_command is not None and not child.vllm_words:
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
    """Refuse options that an engine doesn't have. `why`: the reason for this engine.

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
    try:
        refuse_lacking(engine, asked, why=why)
    except RequestError as error:
        raise typer.BadParameter(str(error)) from None
    name = SERVERS.get(engine, "")
    if name and (said := [flag(each, asked[each]) for each in NOT_SERVERS if each in asked]):
        raise typer.BadParameter(
            f"{' and '.join(said)} {_is(said)} not for {name} ({why}); leave {_it(said)} out"
        )
    if load.trust_remote_code and not rules_of(engine).runs_remote_code:
        raise typer.BadParameter(
            f"--trust-remote-code is not for {rules_of(engine).title}, which runs no checkpoint's code "
            f"({why}); say --backend transformers or vllm, or leave it out"
        )


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"


Plan = Annotated[
    Path | None, Option(metavar="FILE", help="Run what snugvl plan --save wrote, to the byte, if it fits.")
]


@options.grouped(options.SERVED)
def serve(
    command: typer.Context,
    model: Model = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Keys = None,
    api_key_file: KeyFile = None,
    no_auth: NoAuth = False,
    allow_origin: AllowOrigin = None,
    served_model_name: Names = None,
    *,
    load: LoadOptions,
    plan: Plan = None,
    child: ChildOptions,
    max_concurrent: MaxConcurrent = 256,
    deadline: Deadline = 600.0,
    drain: Drain = 30.0,
    max_body: MaxBody = 64,
    allow_local_media: AllowLocalMedia = None,
    allow_private_media: AllowPrivateMedia = False,
    allowed_media_domains: AllowedMediaDomains = None,
    log_level: LogLevel = "info",
    log_prompts: LogPrompts = False,
    key_requests_per_minute: KeyRequestsPerMinute = None,
    key_concurrent: KeyConcurrent = None,
    quiet: options.Quiet = False,
) -> None:
    """Serve a model behind the APIs of OpenAI, Ollama and Anthropic, with a page at /.

    The engine runs in a process of its own that is started again when it dies. Only this machine is let in,
    unless --host says otherwise; then an --api-key is needed. Ctrl+C and SIGTERM finish what runs, up to
    --drain seconds, and exit with 0; a second Ctrl+C stops at once.
    """
    started = time.monotonic()
    from snugvl.server.settings import ServerSettings

    settings = ServerSettings(
        host=host, port=port, names=_names(served_model_name or []), log_prompts=log_prompts,
        api_keys=_keys(api_key or [], api_key_file, no_auth=no_auth, host=host), drain_s=drain,
        max_body_bytes=max_body * MIB, max_concurrent=max_concurrent, deadline_s=deadline or None,
        key_requests_per_minute=key_requests_per_minute, key_concurrent=key_concurrent,
        allow_local_media=_folder(allow_local_media), allow_private_media=allow_private_media,
        allow_origins=_origins(allow_origin or []), allowed_media_domains=_domains(allowed_media_domains),
    )  # fmt: skip
    asked = replace(load, model=model or "")
    check(asked, child)
    job = Serving(asked, child, settings, plan, quiet=quiet, log_level=log_level, started=started)
    code = job.run(command.obj)
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class Serving:
    """The command's options. `load.model` is empty where no model was named; `plan`: path of a saved plan."""

    load: LoadOptions
    child: ChildOptions
    settings: ServerSettings
    plan: Path | None = None
    quiet: bool = False
    log_level: str = "info"
    started: float = 0.0

    def run(self, begun: Launched | None = None) -> int:
        """Plan, print, load, serve; the exit code. `begun`: an engine's process that was launched already."""
        from snugvl.cli.serve_plan import launch, look

        with launch(self.load, self.child, begun) as launched:  # it imports torch while we import and plan
            seen = None if self.child.attach is not None else look()
            from snugvl.cli.running import announced
            from snugvl.cli.serve_show import LoadingProgress, base_url
            from snugvl.server.connection import address_of
            from snugvl.server.run import run

            # Before anything is loaded: a taken port is known at once.
            with _listening(self.settings) as listener:
                settings = replace(self.settings, port=address_of(listener)[1])
                service, settings, name = self._service(settings, launched, seen)
                _log("warning" if self.quiet and self.log_level == "info" else self.log_level)
                loading = LoadingProgress(service, quiet=self.quiet, started=self.started)
                url = base_url(settings.host, settings.port)
                try:
                    with announced(url, name, settings.names):
                        return run(service, settings, listener, loading)
                finally:
                    loading.close()

    def asked(self) -> tuple[LoadOptions, SavedPlan | None]:
        """The options, with those of a saved plan, and that plan."""
        if self.plan is None:
            return self.load, None
        from snugvl.planner.report.document import read

        kept = read(self.plan)
        return kept.over(self.load), kept

    def _service(
        self, settings: ServerSettings, launched: Launched | None, seen: Future[Machine] | None
    ) -> tuple[EngineService, ServerSettings, str]:
        """The engine that was asked for or planned, announced; the settings with the model's names; and the
        model as it was named or chosen."""
        from snugvl.cli.serve_plan import attached, check_installed, engine_for, plan_for
        from snugvl.cli.serve_show import show_attached, show_banner, show_plan

        load, child = self.load, self.child
        if child.attach is not None:
            settings = replace(settings, names=settings.names or (load.model or "default",))
            there = attached(load, child)
            if not self.quiet:
                show_attached(child.attach, there.backend, load.model or None, settings)
            return there, settings, load.model
        load, kept = self.asked()
        planned = plan_for(load, child, seen, kept)
        check_engine(load, child, planned.engine, planned.why)
        settings = replace(settings, names=settings.names or (_public_name(planned.name),))
        check_installed(load, child)
        service = engine_for(planned, load, child, launched)
        if not self.quiet:
            show_plan(planned)
            show_banner(planned, settings)
        return service, settings, planned.name


def _listening(settings: ServerSettings) -> socket:
    """The listening socket.

    Raises:
        SnugvlError: it is taken; says whose server of yours has the port.
    """
    from snugvl.cli import running
    from snugvl.server.connection import PortTaken, listen

    try:
        return listen(settings)
    except PortTaken as error:
        if (mine := running.owner(settings.port)) is None:
            raise
        raise PortTaken(
            f"your own server listens at {mine.url} already (process {mine.pid}, with "
            f"{', '.join(mine.names)}): use that one, stop it, or choose another port, {error.another}"
        ) from None


def _keys(given: list[str], file: Path | None, *, no_auth: bool, host: str) -> tuple[str, ...]:
    from snugvl.server import settings as keys
    from snugvl.server.settings import is_loopback

    if "/" in host or (host.count(":") == 1):  # two colons and more are an IPv6 address
        raise typer.BadParameter(
            f"--host {host} is more than a name or an address; write it like --host 127.0.0.1 --port 8000"
        )
    found = list(given)
    if os.environ.get("SNUGVL_API_KEY"):
        found.append(os.environ["SNUGVL_API_KEY"])
    if file is not None:
        found += keys.read_keys(file)
        if keys.others_may_read(file):
            say(f"{file} may be read by other users of this machine; chmod 600 keeps them out")
    if no_auth and found:
        raise typer.BadParameter("--no-auth lets everybody in; give no API key with it")
    if not found and not no_auth and not is_loopback(host):
        raise typer.BadParameter(
            f"--host {host} lets other machines in: give an --api-key, "
            "or say --no-auth if everybody who reaches it may use it"
        )
    return keys.checked(found)


def _domains(given: list[str] | None) -> tuple[str, ...] | None:
    """Host names as URLs have them; empty for "none", and None where no host was given.

    Raises:
        typer.BadParameter: one is not the name of a host.
    """
    if not given:
        return None
    hosts = [host.strip().lower().removeprefix(".") for words in given for host in words.split(",")]
    for host in hosts:
        if not host.isascii() or not host.replace(".", "").replace("-", "").isalnum():
            raise typer.BadParameter(
                f"--allowed-media-domains {host!r} is not a host; give a name such as example.org"
            )
    return tuple(host for host in hosts if host != "none")


def _names(given: list[str]) -> tuple[str, ...]:
    """Names of the model, each once."""
    names = [name.strip() for name in given]
    for name in names:
        if not name or not name.isprintable():
            raise typer.BadParameter(f"--served-model-name {name!r} is not a name; give one such as my-model")
    return tuple(dict.fromkeys(names))


def _origins(given: list[str]) -> tuple[str, ...]:
    """Origins as a browser writes them: scheme, name and port, without a slash."""
    for origin in given:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
            raise typer.BadParameter(
                f"--allow-origin {origin!r} is not the address of a page's host as browsers write it; "
                "say https://example.org, http://localhost:3000 or '*'"
            )
    return tuple(given)


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise typer.BadParameter(f"--allow-local-media {path} is not a folder")
    return path


def _public_name(model: str) -> str:
    """The model's name in the API: for a folder or a file its own name, so that its path isn't revealed."""
    folder = expanded(model)
    return folder.resolve().name if folder.exists() else model


def _log(level: str) -> None:
    """Log lines of that level and above to standard error; requests have level info."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    ours = logging.getLogger("snugvl")
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(level.upper())
    # What uvicorn has to say of a request, our own lines say; and a slow client is not an error.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
