"""What `add` refuses, in which words; and that what it accepts has room."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.engine.request import EngineRequest
from snugvl.errors import RequestError, RequestTooLarge
from tests.draws import draws
from tests.engine.toy import IMAGE, Toy, engine, picture, request, run

MODEL = Toy()
GOOD = request("a", 1, picture(1), 2)


def refusal(item: EngineRequest, **config: int) -> RequestError:
    here = engine(MODEL, **config)
    with pytest.raises(RequestError) as caught:
        here.add(item)
    assert not here.has_work
    here.check_integrity()
    return caught.value


def test_wrong_prompts() -> None:
    def message(**changes: object) -> tuple[str, str | None]:
        error = refusal(replace(GOOD, **changes))
        assert not isinstance(error, RequestTooLarge)
        return str(error), error.field

    item = GOOD.vision[0]
    assert message(prompt_ids=()) == ("the prompt is empty; it needs at least one token", "prompt_ids")
    assert message(prompt_ids=(1, 48)) == (
        "the prompt has token id 48; this model's vocabulary is 0 to 47",
        "prompt_ids",
    )
    assert message(prompt_ids=(-1,))[0].startswith("the prompt has token id -1;")
    assert message(sampling=replace(GOOD.sampling, logit_bias={99: 1.0}))[1] == "logit_bias"
    assert message(vision=()) == (
        "the prompt has 6 image and video placeholders, but its 0 images and videos have 0 tokens",
        "vision",
    )
    assert message(vision=(item, item))[0].endswith(
        "6 image and video placeholders, but its 2 images and videos have 12 tokens"
    )
    assert message(vision=(replace(item, grid_thw=(1, 6, 5)),)) == (
        "image or video 1 has the grid 1×6×5; its sides must be positive, rows and columns multiples of 2",
        "vision",
    )
    assert message(vision=(replace(item, grid_thw=(0, 4, 6)),))[1] == "vision"
    assert message(vision=(replace(item, patches=item.patches[1:]),)) == (
        "image or video 1 has patches [23, 12] of float32; its grid 1×4×6 needs [24, 12] of float32",
        "vision",
    )
    assert "[24, 11] of float32" in message(vision=(replace(item, patches=item.patches[:, 1:]),))[0]
    assert "of uint8" in message(vision=(replace(item, patches=item.patches.to(torch.uint8)),))[0]
    # As many placeholders as rows, but not where the image is.
    assert message(prompt_ids=(IMAGE, 1, *[IMAGE] * 5)) == (
        "placeholders at token 0 don't match an image of 2×3 tokens",
        "vision",
    )


def test_too_large_for_the_context() -> None:
    error = refusal(request("a", *range(30), max_tokens=40), max_model_len=64)
    assert isinstance(error, RequestTooLarge)
    assert error.field == "max_tokens"
    assert str(error) == (
        "the request needs 70 tokens: 30 of the prompt, and 40 new; the context holds 64 and the KV cache "
        "256. What fits: max_tokens up to 34"
    )


def test_too_large_for_the_cache() -> None:
    assert str(refusal(request("a", *range(30), picture(1), max_tokens=40), num_blocks=12)) == (
        "the request needs 78 tokens: 38 of the prompt, 6 of them image tokens, and 40 new; the context "
        "holds 128 and the KV cache 48. What fits: max_tokens up to 10"
    )


@pytest.mark.parametrize("asked", [None, 5])
def test_a_prompt_too_large_by_itself(asked: int | None) -> None:
    error = refusal(request("a", *range(30), picture(1), max_tokens=asked), num_blocks=8)
    assert error.field == "prompt_ids"
    assert str(error).endswith(
        "the context holds 128 and the KV cache 32. What fits: a prompt of up to 31 tokens, or smaller or "
        "fewer images"
    )


def test_too_many_choices() -> None:
    # 10 tokens of prompt, blocks of 4: 2 shared, and each choice needs ⌈30 / 4⌉ - 2 = 6 of its own.
    assert str(refusal(request("a", *range(10), n=4, max_tokens=20), num_blocks=25)) == (
        "the request needs 30 tokens a choice: 10 of the prompt, and 20 new for each of 4 choices; the "
        "context holds 128 and the KV cache 100. What fits: max_tokens up to 18, or n up to 3"
    )
    assert str(refusal(request("a", *range(10), n=9, max_tokens=40), num_blocks=8)).endswith(
        "What fits: n 1 with max_tokens up to 22"
    )
    engine(MODEL, num_blocks=26).add(request("a", *range(10), n=4, max_tokens=20))


def test_no_number_asked_takes_turns_instead() -> None:
    here = engine(MODEL, num_blocks=8, max_model_len=30)
    outputs = run(here, request("a", *range(10), n=3, max_tokens=None))["a"]
    assert [sum(o.choice == choice for o in outputs) for choice in range(3)] == [20, 20, 20]
    assert here.stats.preemptions > 0


@draws(60)
@given(
    prompt=st.integers(1, 40),
    asked=st.one_of(st.none(), st.integers(1, 30)),
    n=st.integers(1, 4),
    blocks=st.integers(1, 20),
    context=st.integers(2, 60),
)
def test_what_is_accepted_finishes_and_what_is_advised_is_accepted(
    prompt: int, asked: int | None, n: int, blocks: int, context: int
) -> None:
    here = engine(MODEL, num_blocks=blocks, max_model_len=context, max_batched_tokens=16)
    item = request("a", *[i % 40 for i in range(prompt)], n=n, max_tokens=asked)
    try:
        here.add(item)
    except RequestTooLarge as error:
        advice = str(error).split("What fits: ")[1]
        if advice.startswith("max_tokens up to "):
            fits = int(advice.split()[3].rstrip(","))
            for tokens, right in ((fits, True), (fits + 1, False)):
                again = replace(item, sampling=replace(item.sampling, max_tokens=tokens))
                try:
                    engine(MODEL, num_blocks=blocks, max_model_len=context).add(again)
                except RequestTooLarge:
                    assert not right
                else:
                    assert right
        return
    outputs = run(here)["a"]
    assert [o.finish for o in outputs if o.finish] == ["length"] * n
