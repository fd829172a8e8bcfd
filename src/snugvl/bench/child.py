"""`snugvl serve` as a child of the measurement: started, waited for, stopped."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Self

import httpx

from snugvl.errors import CheckpointError, DoesNotFit, EngineUnavailable, InputError, SnugvlError

POLL_S = 0.02
DRAIN_S = 2
PATIENCE_S = 20.0
BY_EXIT_CODE: dict[int, type[SnugvlError]] = {
    2: InputError,
    3: InputError,
    4: CheckpointError,
    5: DoesNotFit,
}

Tell = Callable[[str], None]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class ServerProcess:
    """A server of ours: `with Child("pocket", ["--device", "cpu"]) as child: child.wait(print, 60)`.

    `quiet`: without a line for every request, which `said` would have.

    Attributes:
        url: where it listens.
        command: what was started.
        began: `time.perf_counter()` of the start.
    """

    def __init__(self, model: str | None, options: Sequence[str], *, quiet: bool = True) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        named = [model] if model is not None else []
        words = [*named, *options, "--port", str(port), "--drain", str(DRAIN_S)]
        words += ["--quiet"] if quiet else []
        self.command = (sys.executable, "-m", "snugvl.cli", "serve", *words)
        self.began = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        environment = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES}
        self.began = time.perf_counter()
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl+C is ours; we stop it
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._log is not None
        try:
            self._process.terminate()
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        finally:
            self._log.close()

    def wait(self, tell: Tell, patience_s: float) -> float:
        """Seconds from the start until it takes requests; `tell` hears of each stage.

        Raises:
            SnugvlError: it ended before (its own words, the exception of its exit code), or took longer.
        """
        assert self._process is not None
        said = ""
        with httpx.Client(trust_env=False, timeout=5) as http:
            while self._process.poll() is None:
                ready, detail = _health(http, self.url)
                seconds = time.perf_counter() - self.began
                if ready:
                    return seconds
                stage = detail.partition(" (")[0]
                if stage and stage != said:
                    tell(stage)
                    said = stage
                if seconds > patience_s:
                    raise EngineUnavailable(f"snugvl serve was not ready after {patience_s:g} s: {detail}")
                time.sleep(POLL_S)
        raise self._failure()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    def said(self) -> list[str]:
        """The lines that it printed on stderr so far."""
        assert self._log is not None
        number = self._log.fileno()  # the server writes where this file's position is: it is left alone
        text = os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def _failure(self) -> SnugvlError:
        assert self._process is not None
        lines = self.said()
        code = self._process.returncode
        message = lines[-1].removeprefix("snugvl: ") if lines else f"it said nothing (exit code {code})"
        kind = BY_EXIT_CODE.get(code, EngineUnavailable)
        return kind(f"snugvl serve did not start: {message}")


# Keys and servers of this shell are for servers elsewhere; a key would lock us out of our own.
OUR_VARIABLES = ("SNUGVL_API_KEY", "SNUGVL_SERVER")


def _health(http: httpx.Client, url: str) -> tuple[bool, str]:
    """Whether it is ready, and what it is doing."""
    try:
        answer = http.get(f"{url}/health")
        return answer.status_code == 200, str(answer.json().get("detail") or "")
    except (httpx.HTTPError, ValueError):
        return False, ""
