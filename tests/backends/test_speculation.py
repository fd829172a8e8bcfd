"""Drafted tokens, from prompts with pictures to text: stop strings and usage."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from snugvl.backends.native.backend import NativeBackend
from snugvl.core.messages import Delta, Picture, Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.engine.speculation import Speculation
from snugvl.tasks.prompts import SCENE

PICTURES = sorted((Path(__file__).parents[2] / "examples" / "images").glob("*.png"))[:2]


def asked(stop: tuple[str, ...] = (), **sampling: object) -> list[Request]:
    """About pictures, without a grammar: random weights repeat themselves."""
    params = SamplingParams(max_tokens=70, stop=stop, **sampling)  # type: ignore[arg-type]
    pictures = [Image.open(path).convert("RGB") for path in PICTURES]
    return [Request((user(Picture(picture), SCENE),), params) for picture in pictures]


def answers(backend: NativeBackend, requests: list[Request]) -> list[list[Delta]]:
    streams = [backend.submit(each) for each in requests]
    return [list(stream) for stream in streams]


def told(deltas: list[Delta]) -> tuple[object, ...]:
    last = deltas[-1]
    return "".join(each.text for each in deltas), last.finish_reason, last.stop, last.usage


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}, {"stop": ("name", "}]")}])
@pytest.mark.sample("sampling0")
def test_the_same_text_and_what_was_guessed(
    sampling: dict[str, object], backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = backend._engine
    right = answers(backend, asked(**sampling))  # type: ignore[arg-type]
    assert all(each.drafts == (0, 0) for deltas in right for each in deltas)
    made = Speculation(replace(engine.config, speculation="ngram"))
    monkeypatch.setattr(engine, "_speculation", made)
    found = answers(backend, asked(**sampling))  # type: ignore[arg-type]
    assert [told(deltas) for deltas in found] == [told(deltas) for deltas in right]
    sums = [deltas[-1].drafts for deltas in found]
    if "stop" in sampling:  # the step that it ended in was not read to its end
        assert sum(accepted + rejected for accepted, rejected in sums) <= made.drafted
        return
    assert sum(accepted for accepted, _ in sums) == made.accepted
    assert sum(rejected for _, rejected in sums) == made.drafted - made.accepted
    assert made.drafted > 0
