"""Ways to round weights to few bits, beside each other: what each costs SmolLM2-135M-Instruct.

    PYTHONPATH=benchmarks python -m training.rounding [--tokens 300] [--json FILE]

The decoder's matrices are rounded in float32 and all else stays as it is, so the figures are of the rounding
alone: KL in nats a token to the exact model, on a text (the chapter on objects of Python's reference).
"Another text" is of other chapters of the same book, which flatters what is fitted to it. Channels are in
another order than in the published file (`Release.shuffled`).

    squares        mean square of each column's input: of random tokens, as our engine has them, or of a text
    compensated    columns one after the other, what is left over given to those that follow: GPTQ, Frantar et
                   al. 2022 (https://arxiv.org/abs/2210.17323), largest inputs first, on the same scales
    half-quadratic HQQ, Badri and Shaji 2023 (https://mobiusml.github.io/hqq_blog/)
"""

import argparse
import pydoc_data.topics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from training.format_cost import text
from training.pocket.format_error import at_answers, compared
from training.releases import SMOLLM2

import machine
from snugvl.checkpoint.families import read_config
from snugvl.core.formats import FORMATS, integer_of
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.layers.linear import Linear
from snugvl.layers.weights import FormatName, to_few_bits
from snugvl.models import sensitivity
from snugvl.models.loader import load_model

CALIBRATION_TOKENS = 1024
Matrices = Mapping[str, torch.Tensor]
Rounded = Callable[[str, torch.Tensor], torch.Tensor]


def half_quadratic(values: torch.Tensor, bits: int, group: int, rounds: int = 8) -> torch.Tensor:
    """The zero point moved so that the error shrinks in the lₚ norm, p = 0.7."""
    wide, most = values.view(len(values), -1, group), (1 << bits) - 1
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    step = ((high - low) / most).clamp(min=1e-8).bfloat16().float()
    zero, kept, best, beta = -low / step, -low / step, torch.full_like(low, torch.inf), 10.0
    for _ in range(rounds):
        codes = (wide / step + zero).round().clamp(0, most)
        error = wide - (codes - zero) * step
        magnitude = error.abs().clamp(min=1e-9)
        loss = magnitude.pow(0.7).mean(-1, keepdim=True)
        kept, best = torch.where(loss < best, zero, kept), torch.minimum(loss, best)
        shrunk = error.sign() * (magnitude - magnitude.pow(-0.3) / beta).clamp(min=0)
        zero, beta = (codes - (wide - shrunk) / step).mean(-1, keepdim=True), beta * 1.01
    zero = kept.bfloat16().float()
    return (((wide / step + zero).round().clamp(0, most) - zero) * step).view_as(values)


def compensated(values: torch.Tensor, kind: FormatName, group: int, gram: torch.Tensor) -> torch.Tensor:
    """GPTQ, with the scales and zero points of `to_few_bits`."""
    rows, columns = values.shape
    most, at_once = (1 << FORMATS[kind].bits) - 1, 96
    made = to_few_bits(values, kind, group, gram.diagonal())
    assert made.scale is not None
    assert made.zero is not None
    step, zero = (each.float().repeat_interleave(group, 1) for each in (made.scale, made.zero))
    damped = gram + torch.eye(columns) * gram.diagonal().mean() * 0.01
    order = damped.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    left, step, zero = (each.T[order].contiguous() for each in (values, step, zero))
    found = torch.empty_like(left)
    for start in range(0, columns, at_once):
        end = min(start + at_once, columns)
        errors = torch.empty(end - start, rows)
        for i in range(start, end):
            codes = (left[i] / step[i] + zero[i]).round().clamp(0, most)
            found[i] = (codes - zero[i]) * step[i]
            errors[i - start] = error = (left[i] - found[i]) / upper[i, i]
            left[i + 1 : end] -= upper[i, i + 1 : end, None] * error
        left[end:] -= upper[start:end, end:].T @ errors
    back = torch.empty_like(found)
    back[order] = found
    return back.T


class Subject:
    """The exact model, its matrices, and what is asked of it."""

    def __init__(self, tokens: int) -> None:
        folder = SMOLLM2.shuffled()
        self.processor = Processor.from_folder(folder, read_config(folder))
        self.model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
        layers = self.model.decoder.layers.named_modules()
        self.linears = {name: each for name, each in layers if isinstance(each, Linear)}
        self.matrices: Matrices = {name: each.weight.clone() for name, each in self.linears.items()}
        self.ids = text(self.processor).prompt_ids[:tokens]
        self.exact = self.logits(self.ids)

    def logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Of the tokens after the first."""
        opening = PreparedPrompt(ids[:1], (), 0, bare=True)
        return at_answers(self.model, [opening], [ids[1:]], "bf16")

    def grams(self, ids: tuple[int, ...]) -> Matrices:
        """Of each matrix' inputs, `[columns, columns]`."""
        found: dict[str, torch.Tensor] = {}
        names, plain = {id(each): name for name, each in self.linears.items()}, Linear._plain

        def seen(linear: Linear, x: torch.Tensor) -> torch.Tensor:
            if id(linear) in names:
                found[names[id(linear)]] = x.T @ x / len(x)
            return plain(linear, x)

        with mock.patch.object(Linear, "_plain", seen):
            self.logits(ids)
        return found

    def cost(self, rounded: Rounded) -> dict[str, float]:
        """With its matrices rounded so."""
        for name, linear in self.linears.items():
            linear.weight.copy_(rounded(name, self.matrices[name]))
        return compared(self.logits(self.ids), self.exact)


def ways(subject: Subject) -> dict[str, tuple[float, Rounded]]:
    """Bits of a weight, scales included, and the rounding, by name."""
    vocab = subject.model.config.text.vocab_size
    other = pydoc_data.topics.topics["specialnames"] + pydoc_data.topics.topics["typesseq"]
    ids = tuple(subject.processor.tokenizer.encode(other)[:CALIBRATION_TOKENS])
    random, book = subject.grams(tuple(sensitivity.some_ids(vocab))), subject.grams(ids)

    def fitted(bits: int, group: int, grams: Matrices | None) -> tuple[float, Rounded]:
        def rounded(name: str, values: torch.Tensor) -> torch.Tensor:
            squares = None if grams is None else grams[name].diagonal()
            return to_few_bits(values, _kind(bits), group, squares).wide(torch.float32)

        return bits + 32 / group, rounded

    def gptq(name: str, values: torch.Tensor) -> torch.Tensor:
        return compensated(values, "int4", 64, book[name])

    def mixed(name: str, values: torch.Tensor) -> torch.Tensor:
        more = name.endswith(("qkv_proj", "down_proj"))
        return fitted(5 if more else 4, 64, random)[1](name, values)

    more = sum(
        each.numel() for name, each in subject.matrices.items() if name.endswith(("qkv_proj", "down_proj"))
    )
    share = more / sum(each.numel() for each in subject.matrices.values())
    return {
        "4 bits, groups of 64, half-quadratic": (4.5, lambda _, values: half_quadratic(values, 4, 64)),
        "4 bits, groups of 64, least squares, all columns alike": fitted(4, 64, None),
        "4 bits, groups of 64, squares of random tokens": fitted(4, 64, random),
        "4 bits, groups of 64, squares of another text": fitted(4, 64, book),
        "4 bits, groups of 64, compensated by another text": (4.5, gptq),
        "4 bits, groups of 32, squares of random tokens": fitted(4, 32, random),
        "4 bits, groups of 192, squares of random tokens": fitted(4, 192, random),
        "4 bits, but 5 of qkv and down, squares of random tokens": (4.5 + share, mixed),
        "5 bits, groups of 64, least squares, all columns alike": fitted(5, 64, None),
        "5 bits, groups of 64, squares of random tokens": fitted(5, 64, random),
        "5 bits, groups of 64, squares of another text": fitted(5, 64, book),
        "6 bits, groups of 64, squares of random tokens": fitted(6, 64, random),
    }


def _kind(bits: int) -> FormatName:
    return integer_of(bits)


@torch.inference_mode()
def main() -> None:
    """Every way, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(machine.describe())
    subject = Subject(given.tokens)
    results: dict[str, Any] = {"model": SMOLLM2.packages[0], "tokens": len(subject.exact), "ways": {}}
    for name, (bits, rounded) in ways(subject).items():
        row = subject.cost(rounded) | {"bits": bits}
        results["ways"][name] = row
        print(f"{name:<58}{bits:>6.2f}{row['kl_nats']:>9.4f}{row['top1_agreement']:>8.1%}", flush=True)
    machine.save("smollm2/rounding", results, given.json)


if __name__ == "__main__":
    main()
