"""A released model on a GPU: its GGUF beside llama.cpp's answers, every format's speed, planned beside taken.

    PYTHONPATH=.:src:benchmarks python benchmarks/release.py --llamacpp answers.json [--prompts 200]   # a CPU
    PYTHONPATH=.:src:benchmarks python benchmarks/release.py --beside answers.json [--out FILE]       # a GPU

Qwen2.5-Coder-1.5B-Instruct (`training/releases.py`). llama.cpp answers greedily with the file as it is, where
it rounds activations to 8 bits; our engine does so on the GPU, and where two answers part, the lead of what
ours took over what llama.cpp took is printed (nats; it is ours, from its own log-probabilities).

The engine is loaded as anybody loads it, answers questions of many lengths, and the kernels that were
compiled after it said that it was ready are counted. Then each format: a process of its own loads it in
7,200 MiB, and
`plan_vs_native.py` fills it, another one measures tokens a second of one answer.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from training.format_cost import questions
from training.releases import CODER

import machine
import snugvl
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams

LONGEST = 48
AT_ONCE = 4
LIKELIEST = 5
CELL = "4096:0:4:7200MiB"
FORMATS = ("bf16", "int8", "int6", "int5", "int4")
Answer = list[dict[str, Any]]


def answer(model: Any, prompt: str) -> Answer:
    """A greedy answer: of each token its bytes (hex) and the likeliest with their log-probabilities."""
    sampling = SamplingParams(max_tokens=LONGEST, temperature=0.0, logprobs=LIKELIEST)
    found: Answer = []
    for delta in model.submit(Request((user(prompt),), sampling)):
        for each in delta.logprobs:
            top = {one.bytes.hex(): one.logprob for one in each.top}
            found.append({"text": each.bytes.hex(), "top": top | {each.bytes.hex(): each.logprob}})
    return found


def answers(model: Any, asked: Sequence[str], at_once: int) -> list[Answer]:
    """All answers, a few at once."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: answer(model, prompt), asked))


def compare(ours: Answer, theirs: Answer) -> dict[str, Any]:
    """Tokens until two answers part, and our lead over theirs there in nats (None: beyond the top)."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine["text"] != other["text"]:
            top = mine["top"]
            second = top.get(other["text"])
            return {"equal": index, "lead": None if second is None else top[mine["text"]] - second}
    return {"equal": min(len(ours), len(theirs)), "lead": None, "whole": len(ours) == len(theirs)}


def beside(theirs: Path, count: int) -> dict[str, Any]:
    """The GGUF on our engine, beside llama.cpp."""
    asked, written = list(questions(count)), json.loads(theirs.read_text())
    assert [row["prompt"] for row in written["answers"]] == asked
    began = time.perf_counter()
    with snugvl.load(CODER.file(), backend="native", memory="7200MiB") as model:
        ready = time.perf_counter() - began
        backend: Any = model.backend
        began = time.perf_counter()
        early = [answer(backend, prompt) for prompt in asked[:24]]
        first = time.perf_counter() - began
        ours = early + answers(backend, asked[24:], 16)
        stats = backend.stats()
    rows = [compare(mine, other["tokens"]) for mine, other in zip(ours, written["answers"], strict=True)]
    leads = sorted(row["lead"] for row in rows if row["lead"] is not None)
    equal = sum(row.get("whole", False) for row in rows)
    found = {
        "prompts": count, "ready_s": ready, "first_24_s": first, "equal": equal,
        "tokens_equal": sum(row["equal"] for row in rows), "tokens": sum(map(len, ours)),
        "median_lead": median(leads) if leads else None, "leads": leads,
        "compiled_after_ready": stats.kernel_compilations,
    }  # fmt: skip
    print(
        f"ready in {ready:.1f} s, the first 24 answers took {first:.1f} s; "
        f"{stats.kernel_compilations} kernels were compiled meanwhile"
    )
    print(
        f"{equal} of {count} answers are llama.cpp's; of {len(leads)} others the lead where they part is "
        f"{found['median_lead']:.3f} nats in the middle, {sum(lead > 0.5 for lead in leads)} above 0.5",
        flush=True,
    )
    return found


def formats(work: Path) -> list[dict[str, Any]]:
    """Speed and memory of each format, and of the GGUF."""
    here = Path(__file__).parent
    rows = []
    cases = [(str(CODER.shuffled()), each) for each in FORMATS]
    cases += [(str(CODER.cache / "fp8"), "auto"), (str(CODER.file()), "auto")]
    for path, weights in cases:
        speed = subprocess.run(
            [sys.executable, __file__, "--speed", path, weights],
            check=False, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        out = work / "plan.json"
        plan = [sys.executable, str(here / "plan_vs_native.py"), path, "--weights", weights, "--cells", CELL]
        subprocess.run([*plan, "--jobs", "1", "--out", str(out)], check=False, stdout=subprocess.DEVNULL)
        (row,) = json.loads(out.read_text())["results"]
        row |= {"tokens_per_s": float((speed.stdout.split() or ["nan"])[-1])}
        rows.append(row)
        mib = {name: row.get(f"{name}_bytes", 0) / 2**20 for name in ("planned", "process")}
        print(
            f"{Path(path).name[:24]:<26}{weights:<6}{row['tokens_per_s']:>8.1f} tokens/s, planned "
            f"{mib['planned']:,.0f} MiB, taken {mib['process']:,.0f} {row.get('failed', '')}",
            flush=True,
        )
    return rows


def main() -> None:
    """The command line."""
    parser = machine.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--llamacpp", type=Path, help="write llama.cpp's answers there")
    parser.add_argument("--beside", type=Path, help="llama.cpp's answers")
    parser.add_argument("--work", type=Path, default=Path())
    parser.add_argument("--speed", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.speed:
        path, weights = given.speed
        print(machine.answer_speed(path, "Write a long story.", weights=weights))
        return
    if given.llamacpp:
        options: dict[str, Any] = {"context": 1024, "concurrency": AT_ONCE}
        asked = list(questions(given.prompts))
        with snugvl.load(CODER.file(), backend="llamacpp", device="cpu", **options) as model:
            found = answers(model.backend, asked, AT_ONCE)
        rows = [{"prompt": text, "tokens": made} for text, made in zip(asked, found, strict=True)]
        machine.save("coder/llamacpp", {"answers": rows}, given.llamacpp)
        return
    results: dict[str, Any] = {}
    if given.beside:
        results["beside"] = beside(given.beside, given.prompts)
        machine.save("coder/release", results, given.out)
    results["formats"] = formats(given.work)
    machine.save("coder/release", results, given.out)


if __name__ == "__main__":
    main()
