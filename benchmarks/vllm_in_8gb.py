"""vLLM inside an emulated 8 GB card: plain, where it fails, and started by `snugvl serve --backend vllm`.

    python benchmarks/vllm_in_8gb.py 2b-fp8=/ck/2b-fp8 4b-fp8=/ck/4b-fp8 --vllm-path /tmp/vllm [--out FILE]
    python benchmarks/vllm_in_8gb.py 8b-fp8=/ck/8b-fp8 --gpus 2 --vllm-path /tmp/vllm        # tensor parallel

Ballasts leave each GPU `--free-mib`. Plain is `vllm serve FOLDER` with the share of the card that its default
of 0.92 means on a card of that size, since it counts the whole card. Ours gets no flag but the engine: the
plan makes the rest. It is asked about a 1024×1024 picture; then its ledger is printed, with vLLM's own
figures, beside what NVML says. `--vllm-path` is a folder of packages; a command of `vllm` is made for it.
"""

import argparse
import os
import re
import stat
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import machine
from ballast import MIB, Ballast
from peer import VLLM_ENVIRONMENT, Peer, PeerDied
from serving import gpu_peak_bytes, question, serve
from snugvl.bench.measure import GpuWatch, free_port
from snugvl.errors import SnugvlError

DEFAULT_SHARE = 0.92
LINES = re.compile(
    r"(Model loading took .*|Available KV cache memory.*|GPU KV cache size.*|Graph capturing finished.*"
    r"|Estimated CUDA graph memory.*|.*is less than desired GPU memory.*|No available memory.*"
    r"|To serve at least one request.*|.*OutOfMemoryError.*)"
)
START_S = 300.0


def command_for(path: str, folder: Path, log: Path) -> str:
    """A `vllm` whose packages are in `path`. All that it writes goes to `log`, too."""
    script = folder / "vllm"
    script.write_text(
        f"#!/bin/bash\nexec > >(tee -a {log}) 2>&1\n"
        f'PYTHONPATH={path} exec {sys.executable} -m vllm.entrypoints.cli.main "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def plain(command: str, model: str, share: float, gpus: int, log: Path) -> dict[str, Any]:
    """`vllm serve` with nothing but the share: whether it starts, and what it says."""
    port = free_port()
    words = [
        *command.split(),
        "serve",
        model,
        "--port",
        str(port),
        "--gpu-memory-utilization",
        f"{share:.4f}",
    ]
    words += ["--tensor-parallel-size", str(gpus)] if gpus > 1 else []
    with Peer(words, f"http://127.0.0.1:{port}", log) as peer:
        try:
            ready_s = peer.wait(START_S)
        except PeerDied as error:
            return {"started": False, "said": last_words(log), "end": str(error)[:400], "command": words}
    return {"started": True, "ready_s": ready_s, "said": last_words(log), "command": words}


def last_words(log: Path) -> list[str]:
    """The lines of a log about memory, each once."""
    found = LINES.findall(log.read_text(errors="replace"))
    return list(dict.fromkeys(line.strip()[:300] for line in found))[:12]


def ours(command: str, model: str, options: list[str]) -> dict[str, Any]:
    """`snugvl serve --backend vllm`: start, one picture, ledger."""
    words = ["--backend", "vllm", "--vllm-command", command, *options]
    with GpuWatch() as watch:
        try:
            with serve(model, words, patience_s=2 * START_S) as server:
                record = server.ask(question((1024, 1024), 128))
                row: dict[str, Any] = {
                    "started": True,
                    "ready_s": server.ready_s,
                    "stages": server.stages,
                    "answered": record.error is None and record.output_tokens == 128,
                    "said": record.message,
                    "prompt_tokens": record.prompt_tokens,
                    "first_token_s": record.first_token_s,
                    "tokens_per_s": record.decode_tokens_per_s,
                    "memory": server.memory(),
                }
        except SnugvlError as error:
            row = {"started": False, "said": str(error)}
        return row | {"nvml_peak_bytes": gpu_peak_bytes(watch)}


def show(name: str, alone: dict[str, Any] | None, row: dict[str, Any]) -> None:
    """One model, for people; MiB."""
    if alone is not None:
        verdict = f"started in {alone['ready_s']:.0f} s" if alone["started"] else "did not start"
        print(f"{name}: plain vllm serve {verdict}", *alone["said"][-3:], sep="\n    ")
    if not row["started"]:
        print(f"{name}: snugvl serve --backend vllm did not start: {row['said'][:1200]}", flush=True)
        return
    first = (row["first_token_s"] or 0) * 1e3
    print(
        f"{name}: snugvl serve --backend vllm ready in {row['ready_s']:.0f} s; picture answered: "
        f"{row['answered']} ({row['prompt_tokens']} tokens); first token {first:.0f} ms"
    )
    ledger = row["memory"].get("ledger") or {"rows": [], "process_bytes": 0}
    print(f"    {'':<32}{'planned':>9}{'measured':>9}")
    for each in ledger["rows"]:
        figures = (each.get("planned_bytes"), each.get("measured_bytes"))
        print(
            f"    {each['name']:<32}"
            + "".join(f"{'–' if v is None else f'{v / MIB:,.0f}':>9}" for v in figures)
        )
    peak = row["nvml_peak_bytes"]
    shown = f"{peak / MIB:,.0f}" if peak else "–"
    print(
        f"    {'in all, and by NVML at most':<32}{ledger['process_bytes'] / MIB:>9,.0f}{shown:>9}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--free-mib", type=int, default=8151 - 400)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: no ballast")
    parser.add_argument("--vllm-path", help="Folder with vLLM's packages.")
    parser.add_argument("--vllm-command", default="vllm")
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--option", action="append", default=[], help="One more word for snugvl serve.")
    parser.add_argument("--log-folder", type=Path, default=Path("/tmp"))  # noqa: S108 - only logs
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in VLLM_ENVIRONMENT.items()})
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as card:
        command = (
            command_for(arguments.vllm_path, Path(folder), arguments.log_folder / "vllm.log")
            if arguments.vllm_path
            else arguments.vllm_command
        )
        for gpu in range(arguments.gpus):
            held = card.enter_context(Ballast(arguments.free_mib, arguments.device, gpu=gpu))
            results.setdefault("free_bytes", []).append(held.free_bytes)
        share = DEFAULT_SHARE * min(results["free_bytes"]) / total_bytes(arguments.device)
        for argument in arguments.models:
            name, _, model = argument.partition("=")
            log = arguments.log_folder / f"plain_{name}.log"
            alone = None if arguments.no_plain else plain(command, model, share, arguments.gpus, log)
            row = ours(command, model, arguments.option)
            show(name, alone, row)
            results[name] = {"plain": alone, "ours": row}
    machine.save("vllm_in_8gb", results, arguments.out)


def total_bytes(device: str) -> int:
    """Of the whole card, as vLLM counts it."""
    if device == "cpu":
        return 8 << 30
    from snugvl.hardware.probe import probe

    return probe().gpus[0].total_bytes


if __name__ == "__main__":
    main()
