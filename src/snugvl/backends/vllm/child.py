"""One life of a vLLM server's processes, seen from the server's event loop: started, listened to, ended."""

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import psutil

from snugvl.backends import postmortem
from snugvl.backends.vllm.log import Log, is_error, plain, raised

logger = logging.getLogger("snugvl.vllm")

GRACE_S: Final = 5.0  # from SIGTERM to SIGKILL
BURY_S: Final = 12.0  # more than the nanny takes to give up
LAST_WORDS_S: Final = 0.5
NANNY: Final = Path(__file__).with_name("nanny.py")

_SECRET: Final = re.compile(r"(KEY|KEYS|TOKEN|SECRET|PASSWORD)$", re.I)
_HUB: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # vLLM downloads what isn't there
# Lines reach us as they are written; nobody is told that vLLM was started.
_OURS: Final = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def environment(environ: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """What vLLM sees: our variables without secrets of ours, and `own`."""
    kept = {name: value for name, value in environ.items() if name in _HUB or not _SECRET.search(name)}
    return kept | _OURS | dict(own)


class VllmProcess:
    """A running `vllm serve` and everything it started. Lives in one event loop."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self._popen = popen
        self._killed_because: str | None = None
        self.log = Log()

    @classmethod
    def spawn(cls, words: Sequence[str], own: Mapping[str, str]) -> "VllmProcess":
        """Start it behind a nanny (see `nanny.py`)."""
        popen = subprocess.Popen(  # noqa: S603 (what the user asked for)
            [sys.executable, "-I", "-S", str(NANNY), str(GRACE_S), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(os.environ, own),
            process_group=0,  # Ctrl+C in a terminal is the server's business
        )
        return cls(popen)

    @property
    def pid(self) -> int:
        """Of the nanny: every process of vLLM descends from it."""
        return self._popen.pid

    def family(self) -> list[psutil.Process]:
        """Every process of vLLM."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []

    async def run(self, seen: Callable[[], None]) -> str:
        """Read its log until it is gone; then why it went, as half a sentence.

        `seen` is called whenever the log has grown.
        """
        assert self._popen.stdout is not None
        listener = asyncio.create_task(self._listen(self._popen.stdout, seen))
        try:
            await self._gone()
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
            async with asyncio.timeout(GRACE_S + BURY_S):
                await self._gone()
        if self._popen.poll() is None:  # the nanny itself hangs
            for process in self.family():
                with suppress(psutil.Error):
                    process.kill()
            self._popen.kill()
            await self._gone()
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def _level(self, line: str) -> int:
        """Errors always; what is usual only until it serves."""
        if is_error(line):
            return logging.WARNING
        return logging.DEBUG if self.log.was_well else logging.INFO

    def _hang_up(self) -> None:
        assert self._popen.stdin is not None
        with suppress(OSError):
            self._popen.stdin.close()
        if self._popen.poll() is None:  # a process that was forked meanwhile may hold the pipe, too
            self._popen.terminate()

    def _describe(self) -> str:
        # An error may be followed by a page of what else ended because of it.
        lines = self.log.fresh
        words = raised(lines) or [plain(line) for line in lines]
        text = postmortem.describe(self._popen.poll(), tuple(words)[-postmortem.KEPT_LINES :])
        return text.replace("the engine process", "vLLM")

    async def _gone(self) -> None:
        pause = 0.002
        while self._popen.poll() is None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.1)

    async def _listen(self, pipe: IO[bytes], seen: Callable[[], None]) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while text := await reader.read(1 << 16):
                for line in self.log.feed(text.decode("utf-8", "replace")):
                    logger.log(self._level(line), "%s", line)
                seen()
        finally:
            transport.close()
