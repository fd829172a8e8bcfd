"""The output of `snugvl serve`: the plan, the banner, how loading goes, and when it is ready."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from snugvl.cli.terminal import printable, say, write
from snugvl.core.wrapping import columns, wrapped, wrapped_command

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from snugvl.cli.serve_plan import Planned, Unplanned
    from snugvl.core.service import EngineService, Health
    from snugvl.server.settings import ServerSettings

SAMPLE: Final = "sample-shapes.png"  # of the page
QUESTION: Final = "How many blue squares are there?"  # two, which pocket knows as well
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what is typed to reach it from here
STAGE = re.compile(r" \([^()]*\)$")  # where a restart stands: the reason is said once


def base_url(host: str, port: int) -> str:
    """The address that a program on this machine uses."""
    name = ANYWHERE.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def show_plan(planned: Planned | Unplanned) -> None:
    """Print the plan in short: the answer, the engine and why, the memory bar."""
    from snugvl.cli.serve_plan import Unplanned

    if isinstance(planned, Unplanned):
        return
    from snugvl.planner.report.plain import brief
    from snugvl.planner.report.sections import report

    found = report(planned.plan, planned.machine)
    if planned.reason is not None:
        say(planned.reason)
    width = columns(sys.stdout)
    facts = [
        wrapped(f"  {label:<9}{value}", width, 11)
        for label, value in found.facts
        if label in ("GPUs", "host", "tower", "speed")
    ]
    rest = (wrapped(line, width, 2) for line in (*brief(found, width), *found.notes))
    lines = [wrapped(found.headline, width), *facts, *rest]
    write(printable("\n".join(lines) + "\n\n"))


def show_banner(planned: Planned | Unplanned, settings: ServerSettings) -> None:
    """Print the server's address and a first request to paste."""
    from snugvl.cli.serve_plan import Planned

    names = ", ".join(settings.names)
    title = f"{planned.name}, served as {names}" if names != planned.name else names
    sees = isinstance(planned, Planned) and planned.choice.settings.images > 0
    _banner([("Model", title), ("Engine", _engine(planned)), *_room(planned)], settings, sees=sees)


def show_attached(url: str, backend: str, model: str | None, settings: ServerSettings) -> None:
    """Print the banner of a server before a vLLM or llama.cpp that runs already."""
    title = f"{model}, as {url} serves it" if model else f"what {url} serves first"
    engine = f"{backend} at {url}, which is neither started nor ended"
    _banner([("Model", title), ("Engine", engine)], settings, sees=False)


def _engine(planned: Planned | Unplanned) -> str:
    from snugvl.cli.serve_plan import Unplanned

    if isinstance(planned, Unplanned):
        return planned.why
    gguf, settings = planned.choice.option.model.facts.gguf, planned.choice.settings
    weights = gguf.file_type if gguf else settings.weights_name
    return f"{planned.why}; {weights}, in a process of its own"


def _room(planned: Planned | Unplanned) -> list[tuple[str, str]]:
    from snugvl.cli.serve_plan import Unplanned

    if isinstance(planned, Unplanned):
        return []
    chosen = planned.choice.settings
    pixels = f", images up to {chosen.max_pixels:,} pixels" if chosen.max_pixels else ""
    whole = "prompt, images and answer" if chosen.images else "prompt and answer"
    return [("Room", f"{chosen.context:,} tokens of {whole}{pixels}, by the plan")]


def _banner(facts: list[tuple[str, str]], settings: ServerSettings, *, sees: bool) -> None:
    base = base_url(settings.host, settings.port)
    facts += [
        ("API", f"{base}/v1 (OpenAI), {base} (Ollama, Anthropic)"),
        ("Page", f"{base}/"),
        ("Keys", _keys(settings)),
    ]
    width = columns(sys.stdout)
    lines = [wrapped(f"{label:<9}{value}", width, 9) for label, value in facts]
    first = [ask_line(base), curl_line(base, settings)] if sees else [chat_line(base, settings)]
    key = " (with the key in SNUGVL_API_KEY)" if settings.api_keys else ""
    lines += ["", f"A first request{key}:", *(wrapped_command(command, width) for command in first)]
    write(printable("\n".join(lines) + "\n\n"))


def ask_line(base: str) -> str:
    """A question by our own command line, about the sample picture of the page."""
    import shlex

    from snugvl import server

    picture = Path(server.__file__).parent / "page" / "static" / SAMPLE
    return shlex.join(["snugvl", "ask", "--server", base, str(picture), QUESTION])


def curl_line(base: str, settings: ServerSettings) -> str:
    """A question about a sample picture of the page, which needs no key, for any POSIX shell."""
    import shlex

    get = shlex.join(["curl", "-s", f"{base}/page/{SAMPLE}"])
    ask = shlex.join(["curl", f"{base}/v1/vision/ask", "-F", "image=@-", "-F", f"question={QUESTION}"])
    return f"{get} | {ask}{_key(settings)}"


def _key(settings: ServerSettings) -> str:
    return ' -H "Authorization: Bearer $SNUGVL_API_KEY"' if settings.api_keys else ""


def chat_line(base: str, settings: ServerSettings) -> str:
    """A request without a picture, for a model that takes none."""
    import shlex

    body = {"model": settings.names[0], "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40}
    words = ["curl", f"{base}/v1/chat/completions", "-H", "Content-Type: application/json"]
    return f"{shlex.join(words)}{_key(settings)} -d {shlex.quote(json.dumps(body))}"


def _keys(settings: ServerSettings) -> str:
    from snugvl.server.settings import is_loopback

    if settings.api_keys:
        return f"{len(settings.api_keys)}; every route but /health and the page needs one"
    if is_loopback(settings.host):
        return "none; only this machine reaches it"
    return "none: every program that reaches this machine may use it (--no-auth)"


class LoadingProgress:
    """Shows the loading, by a bar on a terminal and by lines elsewhere, and later states of the engine."""

    def __init__(self, service: EngineService, *, quiet: bool, started: float) -> None:
        self._service = service
        self._quiet = quiet
        self._started = started
        self._bar: tuple[Progress, TaskID] | None = None
        self._said = ""
        self._was_ready = False

    def __call__(self, health: Health) -> None:
        """Show a changed health."""
        if health.ready:
            self._ready()
        elif not self._was_ready and health.state == "starting":
            self._progress(health)
        elif health.state == "failed" and not self._was_ready:
            self.close()  # the command ends with the reason, which is printed then
        elif health.state != "starting":
            self.close()
            self._say(STAGE.sub("", health.detail))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _ready(self) -> None:
        self.close()
        if self._was_ready:
            self._say("ready again")
            return
        self._was_ready = True
        found = self._service.capabilities
        assert found is not None, "an engine that is ready says what it can do"
        images = f", images up to {found.max_pixels:,} pixels" if found.images else ""
        where = f" on {found.device}" if found.device else ""
        where += f" in {found.weights}" if found.weights else ""
        where += " with an FP8 KV cache" if found.kv_cache == "fp8" else ""
        seconds = time.monotonic() - self._started
        room = f"{found.context_tokens:,} tokens of context{images}{self._pool(found.context_tokens)}"
        if found.plan is not None and found.plan.changed:
            self._say(found.plan.changed)
        for sentence in found.replaced:
            self._say(sentence)
        self._say(f"ready in {seconds:.1f} s{where}: {room}")

    def _pool(self, context: int) -> str:
        """The text of how many full conversations the KV cache holds: it takes memory that the plan left."""
        snapshot = self._service.snapshot
        if snapshot is None:
            return ""
        tokens = snapshot.load.num_blocks * snapshot.load.block_size
        return f", a KV cache for {tokens:,} ({tokens / context:.1f} conversations)" if tokens else ""

    def _progress(self, health: Health) -> None:
        if self._quiet:
            return
        if not sys.stderr.isatty():
            self._say(health.detail.partition(" (")[0])  # one line a stage, not one a megabyte
            return
        if self._bar is None:
            self._bar = self._new_bar()
        display, task = self._bar
        display.update(task, description=printable(health.detail), completed=health.progress or 0.0)

    def _new_bar(self) -> tuple[Progress, TaskID]:
        from rich import progress
        from rich.console import Console

        columns = (
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.description}", markup=False),
        )
        display = progress.Progress(*columns, console=Console(stderr=True), transient=True)
        task = display.add_task("", total=1.0)
        display.start()
        return display, task

    def _say(self, text: str) -> None:
        if text != self._said and not self._quiet:
            say(text)
        self._said = text
