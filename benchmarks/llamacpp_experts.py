"""llama.cpp with a mixture's experts in host memory: tokens a second by how many layers' experts are there.

    python benchmarks/llamacpp_experts.py LLAMA_SERVER FILE.gguf --layers 40 34 [--memory 7200] [--out FILE]

Each is started with `--n-cpu-moe`, all layers on the GPU otherwise, files read at once (`--load-mode none`)
and a context of 4,096, and asked twice for 144 tokens after a prompt of 1,088 random ones; the second counts.
Attention is `-fa on` with a cache of q8_0; with --plain `-fa off` with one of f16, for a build without flash
attention of the model's heads, as that of `tests/backends/llamacpp/build.py` is for Qwen3.6-35B-A3B.
Printed: tokens a second of the answer, seconds of the prompt, and what its process takes of the GPU. One that
takes more than --memory (MiB) is said so: a card of that size wouldn't run it.
"""

import argparse
import random
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

import machine
from driver_bytes import ProcessPeak

PORT = 8139
TOKENS = 144


def ask(prompt: list[int]) -> dict[str, Any]:
    """One answer's timings."""
    body = {
        "prompt": prompt, "n_predict": TOKENS, "ignore_eos": True, "cache_prompt": False, "temperature": 0,
    }  # fmt: skip
    answer = httpx.post(f"http://127.0.0.1:{PORT}/completion", json=body, timeout=300, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()["timings"]
    return found


def measure(arguments: argparse.Namespace, layers: int) -> dict[str, Any]:
    """One start of the server."""
    words = [arguments.server, "-m", arguments.file, "-ngl", "99", "--n-cpu-moe", str(layers), "-c", "4096"]
    words += ["--load-mode", "none", "-t", str(arguments.threads), "-np", "1", "--port", str(PORT)]
    words += ["-fa", "off"] if arguments.plain else ["-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"]
    words += arguments.more
    begun = time.monotonic()
    with tempfile.NamedTemporaryFile() as log, ProcessPeak(()) as peak:
        running = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            while True:
                assert running.poll() is None, Path(log.name).read_text()[-3000:]
                with suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=5, trust_env=False).is_success:
                        break
                time.sleep(0.5)
            loaded = time.monotonic() - begun
            prompt = [random.randrange(10, 90000) for _ in range(1088)]
            ask(prompt)
            found = ask(prompt)
            taken = (peak.take() or 0) >> 20
        finally:
            running.terminate()
            running.wait()
    return {
        "layers": layers, "tokens_per_s": found["predicted_per_second"], "first_s": found["prompt_ms"] / 1000,
        "taken_mib": taken, "load_s": round(loaded, 1),
    }  # fmt: skip


def main() -> None:
    """Read the arguments, measure, save."""
    parser = machine.parser(__doc__)
    parser.add_argument("server")
    parser.add_argument("file")
    parser.add_argument("--layers", type=int, nargs="+", default=[40])
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--memory", type=int, default=7200)
    parser.add_argument("--more", action="append", default=[], help="further words: --more=-ub --more=2048")
    parser.add_argument("--plain", action="store_true", help="without flash attention")
    arguments = parser.parse_args()
    rows = []
    for layers in arguments.layers:
        row = measure(arguments, layers)
        rows.append(row)
        over = ", more than the card has" if row["taken_mib"] > arguments.memory else ""
        print(
            f"experts of {layers:3} layers in host memory: {row['tokens_per_s']:7.1f} tokens/s, first after "
            f"{row['first_s']:6.2f} s, {row['taken_mib']:6,} MiB{over}, loaded in {row['load_s']:.0f} s",
            flush=True,
        )
    machine.save("llamacpp_experts", {"rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
