"""Any server of the OpenAI API as a child: started by its command, waited for, ended with its processes."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

POLL_S = 0.1
PATIENCE_S = 15.0

# vLLM on a machine without a network, from a payload without flashinfer's and DeepGEMM's sources.
VLLM_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class PeerDied(Exception):
    """It ended, or took too long, before it was healthy."""


class Peer:
    """`with Peer(command, url, log) as peer: peer.wait(300)`. `began`: `time.perf_counter()` of the start."""

    def __init__(
        self, command: Sequence[str], url: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.command, self.url, self.log = tuple(command), url, log
        self._environment = {**os.environ, **VLLM_ENVIRONMENT, **(environment or {})}
        self.began = 0.0

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.perf_counter()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def wait(self, patience_s: float) -> float:
        """Seconds from the start until `/health` answers 200.

        Raises:
            PeerDied: with the end of its log.
        """
        with httpx.Client(trust_env=False, timeout=5) as http:
            while (seconds := time.perf_counter() - self.began) < patience_s:
                if self._process.poll() is not None:
                    raise PeerDied(
                        f"exit code {self._process.returncode} after {seconds:.0f} s: {self.tail()}"
                    )
                with suppress(httpx.HTTPError):
                    if http.get(f"{self.url}/health").status_code == 200:
                        return seconds
                time.sleep(POLL_S)
        raise PeerDied(f"not healthy after {patience_s:.0f} s: {self.tail()}")

    def tail(self, characters: int = 1500) -> str:
        """The end of what it said."""
        return self.log.read_text(errors="replace")[-characters:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_S)
