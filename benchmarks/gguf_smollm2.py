"""SmolLM2's own GGUF, in 4 bits, read by our engine and by llama.cpp: the same answers?

    PYTHONPATH=.:src python benchmarks/gguf_smollm2.py [--prompts 200] [--out FILE]

Greedy answers of 16 tokens to 200 prompts (`benchmarks/llamacpp_smollm2.py`), on a CPU. Our engine reads the
file as it is; llama.cpp computes with the same values in float32 (`training/releases.py`: `exact`), as with
the file itself it rounds activations to 8 bits. Where two answers part, our engine has to say that it was a
tie. The divergence is that of each token's distribution, as far as the answers are equal: of the 20 likeliest
tokens of ours and all others together, which is at most that of the whole vocabulary. Beside it the weights
that both engines of ours have: of the file, and of the safetensors that transformers makes of it.
"""

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from training.releases import SMOLLM2

import machine
import snugvl
from llamacpp_smollm2 import AT_ONCE, CONTEXT, SHORT, TIE_NATS, exactly, prompts
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.gguf_folder import folder_of
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.models.loader import load_model

LIKELIEST = 20
OURS_AT_ONCE = 16  # weights are widened anew for every step on a CPU, so many sequences share it


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a greedy answer, and the likeliest with their log-probabilities."""

    text: bytes
    top: dict[bytes, float]

    @property
    def second(self) -> tuple[bytes, float]:
        """The next likeliest, and how far behind it is."""
        best = max(self.top.values())
        other = max((each for each in self.top if each != self.text), key=lambda each: self.top[each])
        return other, best - self.top[other]


def answer(model: Any, prompt: str) -> list[Token]:
    """A greedy answer, token by token."""
    sampling = SamplingParams(max_tokens=SHORT, temperature=0.0, logprobs=LIKELIEST)
    found: list[Token] = []
    for delta in model.submit(Request((user(prompt),), sampling)):
        found += [Token(each.bytes, {one.bytes: one.logprob for one in each.top}) for each in delta.logprobs]
    return found


def divergence(ours: Token, theirs: Token) -> float:
    """KL in nats of the tokens that both name, and all others together."""
    shared = [each for each in ours.top if each in theirs.top]
    p, q = ([math.exp(one.top[each]) for each in shared] for one in (ours, theirs))
    p, q = [*p, max(1 - sum(p), 0.0)], [*q, max(1 - sum(q), 0.0)]
    return sum(a * math.log(a / max(b, 1e-12)) for a, b in zip(p, q, strict=True) if a > 0)


def compare(ours: list[Token], theirs: list[Token]) -> dict[str, Any]:
    """Where two answers part, whether that was a tie, and the divergence of each token until then."""
    pairs = list(zip(ours, theirs, strict=False))
    index = next((i for i, (mine, other) in enumerate(pairs) if mine.text != other.text), len(pairs))
    row: dict[str, Any] = {"equal": index, "kl": [divergence(*pair) for pair in pairs[: index + 1]]}
    if index < len(pairs):
        second, lead = pairs[index][0].second
        row |= {"lead_nats": lead, "tie": lead < TIE_NATS and second == pairs[index][1].text}
    return row | {"parted": index < len(pairs) or len(ours) != len(theirs)}


def answers(model: Any, asked: list[str], at_once: int) -> list[list[Token]]:
    """All answers, a few at once."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: answer(model, prompt), asked))


def weights() -> float:
    """The largest difference of a weight between the file and the safetensors made of it."""
    files = gguf_files(str(SMOLLM2.file()))
    assert files is not None
    cpu, wide = torch.device("cpu"), torch.float32
    ours = load_model(folder_of(files), dtype=wide, device=cpu)
    theirs = dict(load_model(SMOLLM2.folder(), dtype=wide, device=cpu).named_modules())
    found = [0.0]
    for name, module in ours.named_modules():
        if hasattr(module, "parts"):
            found.append(float((module.weights.wide(wide) - theirs[name].weights.wide(wide)).abs().max()))
    return max(found)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "smollm2" / "gguf.json")
    given = parser.parse_args()
    asked = list(prompts(given.prompts))
    apart = weights()
    print(f"the largest difference of a weight from what transformers reads: {apart:g}", flush=True)
    with exactly(None, "-t", "1") as model:  # its threads wait for each other by looking again and again
        theirs = answers(model, asked, AT_ONCE)
    print("llama.cpp has answered", flush=True)
    options: dict[str, Any] = {"dtype": "float32", "context": CONTEXT, "concurrency": OURS_AT_ONCE}
    with snugvl.load(SMOLLM2.file(), device="cpu", backend="native", **options) as model:
        ours = answers(model.backend, asked, OURS_AT_ONCE)
    rows = [compare(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    parted = [row for row in rows if row["parted"]]
    ties = sum(row.get("tie", False) for row in parted)
    each = [value for row in rows for value in row["kl"]]
    print(
        f"of {len(rows)} answers of up to {SHORT} tokens {len(rows) - len(parted)} are equal, {ties} part at "
        f"a tie, {len(parted) - ties} elsewhere; {sum(row['equal'] for row in rows):,} tokens are equal; "
        f"KL {mean(each):.2e} nats a token, {max(each):.2e} at most",
        flush=True,
    )
    without = [{name: value for name, value in row.items() if name != "kl"} for row in parted]
    found = {
        "answers": len(rows), "ties": ties, "parted": without,
        "tokens": len(each), "equal_tokens": sum(row["equal"] for row in rows), "kl_mean": mean(each),
        "kl_max": max(each), "weights_apart": apart,
    }  # fmt: skip
    machine.save("smollm2/gguf", found, given.out)


if __name__ == "__main__":
    main()
