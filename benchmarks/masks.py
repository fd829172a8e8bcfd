"""Typed answers beside free ones: the same tokens alone and in company, and how fast.

    python benchmarks/masks.py [MODEL] [--device cuda] [--out FILE]

Answers that follow a JSON schema are asked for one at a time, then all at once, beside free ones; greedy
answers must be equal. Prints tokens a second of both kinds, alone and together.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine
import snugvl
from snugvl.core.messages import Grammar, Request, user
from snugvl.core.sampling import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 3, "maxItems": 6},
    },
    "required": ["title", "year", "tags"],
}


def request(index: int, *, typed: bool) -> Request:
    """One of many questions."""
    grammar = Grammar("json_schema", json.dumps(SCHEMA)) if typed else None
    sampling = SamplingParams(max_tokens=96, ignore_eos=not typed)
    return Request((user(f"Describe thing number {index}."),), sampling, grammar=grammar)


def answered(model: Any, asked: Request) -> tuple[str, int]:
    """The text of an answer, and its tokens."""
    text, tokens = "", 0
    for delta in model.backend.submit(asked):
        text += delta.text
        tokens = tokens if delta.usage is None else delta.usage.completion_tokens
    return text, tokens


def measured(model: Any, requests: list[Request], threads: int) -> tuple[list[str], float]:
    """The answers, and tokens a second of all of them."""
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(lambda each: answered(model, each), requests))
    seconds = time.perf_counter() - start
    return [text for text, _ in answers], sum(tokens for _, tokens in answers) / seconds


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="pocket")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = snugvl.load(options.model, device=options.device)
    kinds = {
        "typed": [request(index, typed=True) for index in range(16)],
        "free": [request(index, typed=False) for index in range(16)],
    }
    figures: dict[str, Any] = {"model": options.model}
    alone = {}
    for kind, requests in kinds.items():
        for threads in (1, 16):  # whatever the first ones wait for: kernels and graphs of every size
            measured(model, requests, threads)
        alone[kind], figures[f"{kind}, one at a time"] = measured(model, requests, 1)
        _, figures[f"{kind}, sixteen at once"] = measured(model, requests, 16)
    measured(model, [*kinds["typed"], *kinds["free"]], 32)
    together, figures["both, 32 at once"] = measured(model, [*kinds["typed"], *kinds["free"]], 32)
    equal = sum(a == b for a, b in zip([*alone["typed"], *alone["free"]], together, strict=True))
    valid = sum(_is_json(text) for text in alone["typed"])
    figures |= {"equal answers alone and together, of 32": equal, "complete JSON, of 16": valid}
    for name, figure in figures.items():
        print(f"{name:42} {figure if not isinstance(figure, float) else round(figure, 1)}")
    machine.save("masks", figures, options.out)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
