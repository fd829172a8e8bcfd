"""`snugvl serve`."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snugvl.cli import options, serve_options
from snugvl.cli.serve_options import ChildOptions
from snugvl.cli.terminal import say
from snugvl.core.options import LoadOptions
from snugvl.core.sizes import MIB

if TYPE_CHECKING:
    from concurrent.futures import Future
    from socket import socket

    from snugvl.backends.process.launch import Launched
    from snugvl.core.service import EngineService
    from snugvl.hardware.machine import Machine
    from snugvl.planner.report.document import SavedPlan
    from snugvl.server.settings import ServerSettings

Plan = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", help="Run what snugvl plan --save wrote, to the byte, if it fits."
    ),
]


@options.grouped(options.SERVED)
def serve(
    command: typer.Context,
    model: serve_options.Model = None,
    host: serve_options.Host = "127.0.0.1",
    port: serve_options.Port = 8000,
    api_key: serve_options.Keys = None,
    api_key_file: serve_options.KeyFile = None,
    no_auth: serve_options.NoAuth = False,
    allow_origin: serve_options.AllowOrigin = None,
    served_model_name: serve_options.Names = None,
    *,
    load: LoadOptions,
    plan: Plan = None,
    vllm_command: serve_options.VllmCommand = None,
    llamacpp_command: serve_options.LlamacppCommand = None,
    no_retry: serve_options.NoRetry = False,
    sleep_after: serve_options.SleepAfter = None,
    attach: serve_options.Attach = None,
    attach_api_key: serve_options.AttachKey = None,
    max_concurrent: serve_options.MaxConcurrent = 256,
    deadline: serve_options.Deadline = 600.0,
    drain: serve_options.Drain = 30.0,
    max_body: serve_options.MaxBody = 64,
    allow_local_media: serve_options.AllowLocalMedia = None,
    allow_private_media: serve_options.AllowPrivateMedia = False,
    allowed_media_domains: serve_options.AllowedMediaDomains = None,
    log_level: serve_options.LogLevel = "info",
    log_prompts: serve_options.LogPrompts = False,
    key_requests_per_minute: serve_options.KeyRequestsPerMinute = None,
    key_concurrent: serve_options.KeyConcurrent = None,
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
        host=host, port=port, names=tuple(served_model_name or ()), log_prompts=log_prompts,
        api_keys=_keys(api_key or [], api_key_file, no_auth=no_auth, host=host), drain_s=drain,
        max_body_bytes=max_body * MIB, max_concurrent=max_concurrent, deadline_s=deadline or None,
        key_requests_per_minute=key_requests_per_minute, key_concurrent=key_concurrent,
        allow_local_media=_folder(allow_local_media), allow_private_media=allow_private_media,
        allow_origins=_origins(allow_origin or []), allowed_media_domains=_domains(allowed_media_domains),
    )  # fmt: skip
    asked = replace(load, model=model or "")
    child = ChildOptions(
        vllm_command, llamacpp_command, attach, attach_api_key, retry=not no_retry, sleep_after_s=sleep_after
    )
    serve_options.check(asked, child)
    job = Serving(asked, child, settings, plan, quiet=quiet, log_level=log_level, started=started)
    code = job.run(command.obj)
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class Serving:
    """What was asked of the command. `load.model` is empty where nobody named one; `plan`: a saved one."""

    load: LoadOptions
    child: ChildOptions
    settings: ServerSettings
    plan: Path | None = None
    quiet: bool = False
    log_level: str = "info"
    started: float = 0.0

    def run(self, begun: Launched | None = None) -> int:
        """Plan, print, load, serve; the exit code. `begun`: an engine's process that was launched already."""
        from snugvl.cli.serve_engine import launch
        from snugvl.cli.serve_plan import look

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
        from snugvl.cli.serve_engine import attached, engine_for
        from snugvl.cli.serve_plan import check_installed, plan_for
        from snugvl.cli.serve_show import show_attached, show_banner, show_plan

        load, child = self.load, self.child
        if child.attach is not None:
            settings = replace(settings, names=settings.names or (load.model or "default",))
            service = attached(load, child)
            if not self.quiet:
                show_attached(child.attach, load.model or None, settings)
            return service, settings, load.model
        load, kept = self.asked()
        planned = plan_for(load, child, seen, kept)
        serve_options.check_engine(load, child, planned.engine, planned.why)
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
        SnugvlError: it can't be had; says whose server of yours has the port.
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
    """Hosts as URLs have them; none of them for "none".

    Raises:
        typer.BadParameter: one is no name of a host.
    """
    if not given:
        return None
    hosts = [host.strip().lower().removeprefix(".") for words in given for host in words.split(",")]
    for host in hosts:
        if not host.isascii() or not host.replace(".", "").replace("-", "").isalnum():
            raise typer.BadParameter(
                f"--allowed-media-domains {host!r} is no host; give a name such as example.org"
            )
    return tuple(host for host in hosts if host != "none")


def _origins(given: list[str]) -> tuple[str, ...]:
    """As a browser writes them: scheme, name and port, without a slash."""
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
    """A folder or a file is served under its own name: where it lies is nobody's business."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.exists() else model


def _log(level: str) -> None:
    """Lines on standard error, of that level and above: requests are of info."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    ours = logging.getLogger("snugvl")
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(level.upper())
    # What uvicorn has to say of a request, our own lines say; and a slow client is no error.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
