"""From tokens to deltas: what is counted as reasoning."""

import asyncio

import pytest

from snugvl.backends.engine_thread import Receiver
from snugvl.backends.inbox import Inbox
from snugvl.checkpoint.locate import POCKET, locate
from snugvl.core.messages import Delta
from snugvl.core.sampling import SamplingParams
from snugvl.engine.request import TokenOutput
from snugvl.inputs.prompt import PreparedPrompt
from snugvl.inputs.tokenizer import Tokenizer

OPENED = PreparedPrompt((1, 2, 3), (), 0, reasoning=True)


def received(pieces: list[str], sampling: SamplingParams, prompt: PreparedPrompt = OPENED) -> list[Delta]:
    """The deltas of an answer whose tokens are those of the pieces, one after the other, in every choice."""
    tokenizer = Tokenizer.from_folder(locate(POCKET))
    receiver = Receiver(tokenizer, prompt, sampling, frozenset())
    ids = [token for piece in pieces for token in tokenizer.encode(piece)]
    for choice in range(sampling.n):
        for index, token in enumerate(ids):
            last = index == len(ids) - 1
            receiver.receive(TokenOutput("r", choice, token, finish="length" if last else None))
    return list(iter(receiver.mailbox.get, None))


def count(*pieces: str) -> int:
    tokenizer = Tokenizer.from_folder(locate(POCKET))
    return sum(len(tokenizer.encode(piece)) for piece in pieces)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("prompt", "thought", "answer"),
    [
        (OPENED, ["a red circle and a ", "blue square", "</think>"], ["yes, ", "a circle"]),
        (OPENED, ["a red circle and a square"], []),  # cut while it thinks
        (PreparedPrompt((1,), (), 0, reasoning=False), ["<think>", "a red", "</think>"], ["yes"]),
        (PreparedPrompt((1,), (), 0, reasoning=False), [], ["yes, a circle"]),
        (PreparedPrompt((1,), (), 0), [], ["yes, a circle"]),
    ],
)
def test_tokens_of_reasoning_are_counted(
    prompt: PreparedPrompt, thought: list[str], answer: list[str], n: int
) -> None:
    """From the first one to the mark that ends it, whatever follows."""
    deltas = received([*thought, *answer], SamplingParams(n=n), prompt)
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == n * count(*thought, *answer)
    assert deltas[-1].reasoning_tokens == n * count(*thought)
    assert bool("".join(delta.reasoning for delta in deltas)) == bool(thought)


def test_tokens_that_a_stop_string_holds_back_are_none_of_it() -> None:
    """The text of the last tokens waits for what may be a stop string; the count doesn't."""
    thought, answer = ["a red circle", "</think>"], ["yes, a circle and a square"]
    deltas = received([*thought, *answer], SamplingParams(stop=("never to be found in this text",)))
    assert count(*thought) <= deltas[-1].reasoning_tokens <= count(*thought) + 1


def test_the_count_survives_what_a_slow_reader_gets_at_once() -> None:
    async def read() -> Delta | None:
        inbox = Inbox()
        for delta in (Delta("", reasoning="hm"), Delta("yes", finish_reason="stop", reasoning_tokens=3)):
            inbox.put(delta)
        return await inbox.get()

    merged = asyncio.run(read())
    assert merged == Delta("yes", reasoning="hm", finish_reason="stop", reasoning_tokens=3)
