"""Our server and another one, in one run on one machine: first token, decode, throughput, and the ratios.

    python benchmarks/versus.py FOLDER --peer-path /tmp/vllm [--peer-options "--gdn-prefill-backend triton"]
    python benchmarks/versus.py FOLDER --image none --prompt-tokens 8 --levels 1:16 --no-peer  # short texts
    python benchmarks/versus.py pocket --device cpu --levels 1:3,2:4 --image 256x256 --max-tokens 16 \\
        --peer 'python -m snugvl serve pocket --device cpu --quiet --port {port}'        # without a GPU

Each server is started, asked at every level once to warm up, then measured `--repeat` times, by the
machinery of `snugvl bench`: the same pictures and texts for both, streamed, greedy, answers of equal length.
The peer is vLLM with CUDA graphs unless `--peer` says otherwise; `--peer-path` is where its packages are.
Prints both tables and the ratios (ours to the peer's); saves both as `snugvl bench --json`.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from serving import serve
from snugvl.bench.measure import BenchmarkRun, BenchmarkSettings, free_port
from snugvl.bench.report import as_text, compare, report
from snugvl.bench.result import BenchmarkResult, StartTimes, to_json
from snugvl.bench.workload import Workload

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
SEED = 1000
VLLM = (
    "{python} -m vllm.entrypoints.cli.main serve {model} --served-model-name m --host 127.0.0.1 "
    "--port {port} "
    '--max-model-len 4096 --limit-mm-per-prompt \'{{"image":1,"video":0}}\' --gpu-memory-utilization 0.30 '
    "--disable-uvicorn-access-log"
)


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


@dataclass(frozen=True, slots=True)
class Question:
    """What both are asked."""

    workload: Workload
    levels: tuple[tuple[int, int], ...]
    repeat: int

    def ask(self, url: str, ready_s: float) -> BenchmarkResult:
        """Warm up, then measure; `ready_s` is kept with the result."""
        warm = tuple((clients, clients) for clients, _ in self.levels)
        BenchmarkRun(self._settings(url, warm, 1, self.workload.seed + 500_000), lambda _: None).run()
        measurement = BenchmarkRun(self._settings(url, self.levels, self.repeat, self.workload.seed), print)
        measurement.run()
        assert measurement.result is not None
        return replace(measurement.result, start=StartTimes(ready_s, None))

    def _settings(
        self, url: str, levels: tuple[tuple[int, int], ...], repeat: int, seed: int
    ) -> BenchmarkSettings:
        workload = replace(self.workload, seed=seed)
        return BenchmarkSettings(url, None, None, (), levels, workload, repeat, 1, 180.0)


def ours(model: str, options: list[str], question: Question) -> BenchmarkResult:
    """Of `snugvl serve`."""
    with serve(model, options) as server:
        return question.ask(server.url, server.ready_s)


def theirs(command: str, model: str, path: str | None, log: Path, question: Question) -> BenchmarkResult:
    """Of the peer."""
    port = free_port()
    words = shlex.split(command.format(python=sys.executable, model=model, port=port))
    environment = {} if path is None else {"PYTHONPATH": path}
    with Peer(words, f"http://127.0.0.1:{port}", log, environment) as peer:
        ready_s = peer.wait(400)
        return question.ask(peer.url, ready_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--name", default="model", help="of the result files")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--levels", default="1:8,8:32,32:96")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--image", default="1024x1024", help="of a request, or none")
    parser.add_argument("--prompt-tokens", type=int, help="of its text, about; a short question by default")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--peer", default=VLLM, help="Its command; {python}, {model} and {port} are filled in."
    )
    parser.add_argument("--peer-options", default="", help="added to its command")
    parser.add_argument("--peer-path", help="PYTHONPATH of the peer.")
    parser.add_argument("--serve", default="", help="Further options of ours: --serve=--no-step-graphs")
    parser.add_argument("--no-peer", action="store_true", help="Only ours.")
    parser.add_argument("--out-folder", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    size = None
    if arguments.image != "none":
        width, height = map(int, arguments.image.split("x"))
        size = width, height
    levels = [tuple(map(int, level.split(":"))) for level in arguments.levels.split(",")]
    workload = Workload(size, arguments.prompt_tokens, arguments.max_tokens, False, SEED)
    question = Question(workload, tuple((clients, count) for clients, count in levels), arguments.repeat)
    folder: Path = arguments.out_folder
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--weights", arguments.weights, "--device", arguments.device]
    options += ["--context", str(arguments.context), *shlex.split(arguments.serve)]
    mine = ours(arguments.model, options, question)
    print(as_text(report(mine)), flush=True)
    (folder / f"versus_{arguments.name}_ours.json").write_text(to_json(mine))
    if arguments.no_peer:
        return
    try:
        log = folder / f"versus_{arguments.name}_peer.log"
        command = f"{arguments.peer} {arguments.peer_options}"
        other = theirs(command, arguments.model, arguments.peer_path, log, question)
    except PeerDied as error:
        sys.exit(f"the peer did not start: {error}")
    (folder / f"versus_{arguments.name}_peer.json").write_text(to_json(other))
    print(as_text(report(other)))
    print(as_text(compare(other, mine, ("peer", "snugvl"))))


if __name__ == "__main__":
    main()
