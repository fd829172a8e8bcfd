"""The prefix cache through real prompts: a second question about a picture, and the next turn."""

from PIL import Image

from snugvl.backends.native.backend import NativeBackend
from snugvl.core.messages import Message, Request, Text, user
from snugvl.core.sampling import SamplingParams

PICTURE = Image.effect_mandelbrot((160, 160), (-3, -2.5, 2, 2.5), 20).convert("RGB")  # 25 tokens
OTHER = Image.new("RGB", (160, 160), "navy")


def ask(backend: NativeBackend, *messages: Message) -> tuple[int, int, int, str]:
    """Tokens looked up and found, items encoded, and the answer."""
    before = backend.stats()
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    text = "".join(delta.text for delta in backend.submit(Request(messages, sampling)))
    after = backend.stats()
    return (
        after.prefix_query_tokens - before.prefix_query_tokens,
        after.prefix_hit_tokens - before.prefix_hit_tokens,
        after.items_encoded - before.items_encoded,
        text,
    )


def test_the_load_tells_what_was_found(backend: NativeBackend) -> None:
    question = user(PICTURE, "What is in this image?")
    length = len(backend.tokenize(Request((question,))).ids)
    looked_up, found, encoded, answer = ask(backend, question)
    assert (looked_up, found, encoded) == (length, 0, 1)
    assert ask(backend, question) == (length, (length - 1) // 16 * 16, 0, answer)
    _, found, _, _ = ask(backend, user(PICTURE, "Why?"))
    assert found >= 16
    before_picture = backend.tokenize(Request((question,))).ids.index(
        backend.tokenize(Request(prompt="<|image_pad|>")).ids[0]
    )
    assert ask(backend, user(OTHER, "What is in this image?"))[1] <= before_picture


def test_the_next_turn_starts_from_the_last(backend: NativeBackend) -> None:
    first = user(PICTURE, "What is in this image?")
    length = len(backend.tokenize(Request((first,))).ids)
    *_, answer = ask(backend, first)
    turns = (first, Message("assistant", (Text(answer),)), user("And what else?"))
    looked_up, found, encoded, _ = ask(backend, *turns)
    assert looked_up == len(backend.tokenize(Request(turns)).ids)
    assert found >= (length - 1) // 16 * 16
    assert encoded == 0
