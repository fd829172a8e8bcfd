"""The process of a child server: started behind a reaper, its log read, ended with all that it started."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from snugvl.backends.child.log import Log, LogForm
from snugvl.backends.lives import read_output, wait_for_exit, watched
from snugvl.backends.process import postmortem
from snugvl.backends.process.launch import without_secrets

GRACE_S: Final = 5.0  # from SIGTERM to SIGKILL
REAP_S: Final = 12.0  # more than the reaper takes to give up
LAST_WORDS_S: Final = 0.5
REAPER: Final = Path(__file__).with_name("reaper.py")

_HUB: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # an engine downloads what isn't there
# Lines reach us as they are written; nobody is told that it was started.
_OURS: Final = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def environment(environ: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """What an engine sees: our variables without secrets of ours, and `own`."""
    return without_secrets(environ, but=_HUB) | _OURS | dict(own)


class ChildProcess:
    """A running server and everything it started. Lives in one event loop."""

    def __init__(self, popen: "subprocess.Popen[bytes]", name: str, form: LogForm) -> None:
        self._popen = popen
        self._name, self._form = name, form
        self._logger = logging.getLogger(f"snugvl.{name.lower().replace('.', '')}")
        self._killed_because: str | None = None
        self.log = Log(form)

    @classmethod
    def spawn(cls, words: Sequence[str], own: Mapping[str, str], name: str, form: LogForm) -> "ChildProcess":
        """Start it behind a reaper (see `reaper.py`). `name`: of the engine, as people know it."""
        popen = subprocess.Popen(  # noqa: S603 (what the user asked for)
            [sys.executable, "-I", "-S", str(REAPER), str(GRACE_S), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(os.environ, own),
            process_group=0,  # Ctrl+C in a terminal is the server's business
        )
        return cls(popen, name, form)

    @property
    def pid(self) -> int:
        """Process id of the reaper, from which every process of the engine descends."""
        return self._popen.pid

    def family(self) -> list[psutil.Process]:
        """Every process of the engine."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []

    async def run(self, seen: Callable[[], None]) -> str:
        """Read its log until it is gone; then why it went, as half a sentence.

        `seen` is called whenever the log has grown.
        """
        assert self._popen.stdout is not None

        def take(text: str) -> None:
            for line in self.log.feed(text):
                self._logger.log(self._level(line), "%s", line)
            seen()

        listener = asyncio.create_task(read_output(self._popen.stdout, take))
        watched(listener, lambda why: self.kill(f"what {self._name} prints can't be read: {why}"))
        try:
            await wait_for_exit(self._popen)
            await asyncio.wait([listener], timeout=LAST_WORDS_S)
            return self._killed_because or self._describe()
        finally:
            listener.cancel()
            await asyncio.wait([listener])

    def kill(self, because: str) -> None:
        """Begin to end it. `because`: what `run` will say, as half a sentence."""
        self._killed_because = self._killed_because or because
        self._hang_up()

    async def stop(self) -> None:
        """End it and wait; nothing is left of it."""
        self._hang_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S + REAP_S):
                await wait_for_exit(self._popen)
        if self._popen.poll() is None:  # the reaper itself hangs
            for process in self.family():
                with suppress(psutil.Error):
                    process.kill()
            self._popen.kill()
            await wait_for_exit(self._popen)
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def _level(self, line: str) -> int:
        """Errors always; what is usual only until it serves."""
        if self._form.is_error(line):
            return logging.WARNING
        return logging.DEBUG if self.log.was_well or self._form.chatty else logging.INFO

    def _hang_up(self) -> None:
        assert self._popen.stdin is not None
        with suppress(OSError):
            self._popen.stdin.close()
        if self._popen.poll() is None:  # a process that was forked meanwhile may hold the pipe, too
            self._popen.terminate()

    def _describe(self) -> str:
        # An error may be followed by a page of what else ended because of it.
        lines = self.log.fresh
        words = self._form.exception_lines(lines) or [self._form.plain(line) for line in lines]
        text = postmortem.describe(self._popen.poll(), tuple(words)[-postmortem.KEPT_LINES :])
        return text.replace("the engine process", self._name)
