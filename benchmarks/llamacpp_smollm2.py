"""A real model on the CPU, by llama.cpp and by our own engine: the same tokens, and tokens a second.

    PYTHONPATH=.:src python benchmarks/llamacpp_smollm2.py [--prompts 200] [--rounds 5] [--out FILE]

SmolLM2-135M-Instruct (`training/releases.py`). Tokens: greedy answers of 16 tokens to 200 prompts from the
same values in float32, with a KV cache in float32; where they part, our engine has to say that it was a tie
(what llama.cpp chose is its second, within 0.01 nats). Then the file as it is, in 4 bits, with the plan's
flags: llama.cpp rounds activations there, so answers part, and how early is printed. Speed: an answer of 48
tokens from each engine in turn, round by round, as this machine is shared; medians, and medians of the ratios
within a round; processor time a token beside them. llama.cpp's threads wait for each other by looking again
and again: where others use a core, all wait. So a thread a core is measured beside what we start
(`backends/llamacpp/settings.py`). `--prompts 0`: speed alone.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from training.releases import SMOLLM2

import machine
import snugvl
from snugvl.backends.llamacpp.loading import ChildBackend
from snugvl.backends.llamacpp.service import LlamacppEngine
from snugvl.backends.llamacpp.settings import LlamacppChoice
from snugvl.bench.workload import WORDS
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams

ASKED = (
    "What is a {}?", "Write a sentence about the word {}.", "Which words rhyme with {}?",
    "Say {} in French.", "Name three things that are like a {}.",
)  # fmt: skip
SHORT, LONG = 16, 48
TIE_NATS = 0.01
AT_ONCE = 4
CONTEXT = 512
EXACT = (
    *("-c", str(AT_ONCE * CONTEXT), "-np", str(AT_ONCE), "-fa", "off", "-ctk", "f32", "-ctv", "f32"),
    *("-dev", "none", "-fit", "off", "--cache-ram", "0"),
)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a greedy answer: its bytes, and its lead over the second, which is named."""

    text: bytes
    second: bytes
    lead: float


def prompts(count: int) -> Iterator[str]:
    """Short questions, no two alike."""
    for index in range(count):
        yield ASKED[index % len(ASKED)].format(WORDS[index // len(ASKED) % len(WORDS)])


def answer(model: Any, prompt: str, tokens: int = SHORT) -> list[Token]:
    """A greedy answer, token by token."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=2)
    found: list[Token] = []
    for delta in model.submit(Request((user(prompt),), sampling)):
        for each in delta.logprobs:
            first, *rest = each.top
            second = next((other for other in (first, *rest) if other.bytes != each.bytes), first)
            found.append(Token(each.bytes, second.bytes, each.logprob - second.logprob))
    return found


@contextmanager
def exactly(file: Path | None = None, *more: str) -> Iterator[Any]:
    """llama.cpp with everything in float32; or with another file, and more flags."""
    choice = LlamacppChoice("smollm2", ("-m", str(file or SMOLLM2.exact()), *EXACT, *more))
    with closing(ChildBackend(lambda: LlamacppEngine(choice))) as backend:
        yield backend


def compare(ours: list[Token], theirs: list[Token]) -> dict[str, Any]:
    """Where two answers part, and whether that was a tie. One that has ended isn't told what came second."""
    pairs = zip(ours, theirs, strict=False)
    index = next((i for i, (mine, other) in enumerate(pairs) if mine.text != other.text), None)
    if index is None and len(ours) == len(theirs):
        return {"equal": len(ours), "parted": False, "lead_nats": None, "tie": False}
    if index is None:
        return {"equal": min(len(ours), len(theirs)), "parted": True, "lead_nats": None, "tie": False}
    mine, other = ours[index], theirs[index]
    tie = mine.lead < TIE_NATS and mine.second == other.text
    return {"equal": index, "parted": True, "lead_nats": mine.lead, "tie": tie}


def answers(model: Any, asked: list[str]) -> list[list[Token]]:
    """All answers, a few at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda prompt: answer(model, prompt), asked))


def speed(model: Any, prompt: str) -> dict[str, float]:
    """Tokens a second behind the first one, and processor time a token, of all our processes."""
    sampling = SamplingParams(max_tokens=LONG, temperature=0.0, ignore_eos=True)
    first = begun = spent = 0.0
    for delta in model.submit(Request((user(prompt),), sampling)):
        if not first and delta.text:
            first, begun, spent = time.perf_counter(), delta.completion_tokens, processor_s()
        last = delta
    tokens = last.usage.completion_tokens - begun
    return {
        "tokens_per_s": tokens / (time.perf_counter() - first),
        "processor_ms": 1000 * (processor_s() - spent) / tokens,
    }


def processor_s() -> float:
    """Of this process and those below it."""
    here = psutil.Process()
    total = 0.0
    for process in (here, *here.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def main() -> None:
    """The command line."""
    parser = machine.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(out=machine.RESULTS / "smollm2" / "llamacpp.json")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    asked = list(prompts(given.prompts))
    if asked:
        found = tokens(asked)
    elif given.out.exists():
        found = json.loads(given.out.read_text())
        del found["machine"]
    found["speed"] = speeds(given.rounds)
    machine.save("smollm2/llamacpp", found, given.out)


def load(path: Path, **options: Any) -> Any:
    """A model as people load it."""
    return snugvl.load(path, device="cpu", context=CONTEXT, **options)


def tokens(asked: list[str]) -> dict[str, Any]:
    """What both engines answer, compared."""
    found: dict[str, Any] = {}
    with load(SMOLLM2.folder(), dtype="float32", concurrency=AT_ONCE) as model:
        ours = answers(model.backend, asked)
    for name in ("float32", "Q4_1"):
        with (
            exactly()
            if name == "float32"
            else load(SMOLLM2.file(), backend="llamacpp", concurrency=AT_ONCE) as model
        ):
            theirs = answers(getattr(model, "backend", model), asked)
        rows = [compare(mine, other) for mine, other in zip(ours, theirs, strict=True)]
        parted = [row for row in rows if row["parted"]]
        ties = sum(row["tie"] for row in parted)
        print(
            f"{name}: of {len(rows)} answers of up to {SHORT} tokens {len(rows) - len(parted)} are equal, "
            f"{ties} part at a tie, {len(parted) - ties} elsewhere; {sum(row['equal'] for row in rows):,} "
            "tokens are equal",
            flush=True,
        )
        found[name] = {
            "answers": len(rows),
            "ties": ties,
            "parted": parted,
            "tokens": sum(len(x) for x in ours),
        }
    return found


def speeds(rounds: int) -> dict[str, Any]:
    """Of each engine and format, in turn."""
    ways: dict[str, Any] = {}
    with ExitStack() as stack:
        enter = stack.enter_context
        ways["snugvl, float32"] = enter(load(SMOLLM2.folder(), dtype="float32")).backend
        ways["snugvl, bfloat16"] = enter(load(SMOLLM2.folder(), dtype="bfloat16")).backend
        ways["llama.cpp, float32"] = enter(load(SMOLLM2.exact(), backend="llamacpp")).backend
        ways["llama.cpp, Q4_1"] = enter(load(SMOLLM2.file(), backend="llamacpp")).backend
        cores = str(psutil.cpu_count())
        ways["llama.cpp, Q4_1, a thread a core"] = enter(exactly(SMOLLM2.file(), "-t", cores))
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, model in ways.items():
                row = speed(model, f"Write a long story about the number {turn}.")
                if turn:  # the first isn't counted
                    taken[name].append(row)
    base = next(iter(taken))
    found: dict[str, Any] = {}
    for name, rows in taken.items():
        ratios = [
            row["tokens_per_s"] / first["tokens_per_s"] for row, first in zip(rows, taken[base], strict=True)
        ]
        found[name] = {
            "tokens_per_s": median(row["tokens_per_s"] for row in rows), "ratio": median(ratios),
            "processor_ms": median(row["processor_ms"] for row in rows), "rounds": rows,
        }  # fmt: skip
        each = found[name]
        print(
            f"{name:<34}{each['tokens_per_s']:>7.1f} tokens/s, {each['ratio']:.2f} times the first, "
            f"{each['processor_ms']:.1f} ms of processor time a token",
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
