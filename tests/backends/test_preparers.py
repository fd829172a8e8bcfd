"""Threads that make prompts: what is heavy waits for its like, and what nobody wants any more ends."""

import asyncio
import threading
from functools import partial

import pytest

from snugvl.backends.preparers import MANY_PIECES, GivenUp, Preparation, Preparers
from snugvl.core.messages import Grammar, Message, Request, Text, Tool, ToolCall, ToolUse, user
from snugvl.errors import DeadlineExceeded

SCHEMA = Request((user("hi"),), grammar=Grammar("json_schema", '{"type": "integer"}'))
LONG_S = 60.0  # until a test has failed


def test_what_is_heavy_and_what_is_long() -> None:
    preparers = Preparers()
    assert preparers.weigh(Request((user("hi"),))) == "light"
    assert preparers.weigh(Request((user(" " * 70_000),))) == "long"
    assert preparers.weigh(Request(prompt=" " * 70_000)) == "long"
    assert preparers.weigh(Request((user("hi"),), tools=ToolUse((Tool("f", " " * 70_000),)))) == "long"
    assert preparers.weigh(SCHEMA) == "heavy"
    preparers.remember(SCHEMA)
    assert preparers.weigh(SCHEMA) == "light", "its grammar was compiled before"
    assert preparers.weigh(Request((user(Text("hi")),), grammar=Grammar("regex", "a"))) == "heavy"


def test_a_conversation_of_thousands_of_pieces_is_long_however_short_its_text() -> None:
    weigh = Preparers().weigh
    call = Message("assistant", (), (ToolCall("c", "f", "{}"),) * (MANY_PIECES + 1))
    assert weigh(Request((user("a"),) * (MANY_PIECES // 2))) == "light"
    assert weigh(Request((user("a"),) * (MANY_PIECES // 2 + 1))) == "long"
    assert weigh(Request((user(*["a"] * MANY_PIECES),))) == "long"
    assert weigh(Request((call,))) == "long"
    assert weigh(Request((user(""),) * MANY_PIECES, grammar=SCHEMA.grammar)) == "long"


def test_what_is_long_is_prepared_one_at_a_time() -> None:
    preparers, go, begun = Preparers(), threading.Event(), list[int]()

    def work(number: int) -> None:
        begun.append(number)
        assert go.wait(LONG_S)

    for number in range(3):
        preparers.submit(Preparation(), partial(work, number), "long")
    assert preparers.submit(Preparation(), lambda: 7, "heavy").result(LONG_S) == 7
    assert begun in ([], [0]), "the others wait, and nobody for them"
    go.set()
    preparers.submit(Preparation(), lambda: None, "long").result(LONG_S)
    assert begun == [0, 1, 2]
    preparers.close()


def test_light_work_does_not_wait_for_heavy_work() -> None:
    preparers, go = Preparers(), threading.Event()
    stuck = [preparers.submit(Preparation(), lambda: go.wait(LONG_S), "heavy") for _ in range(50)]
    assert preparers.submit(Preparation(), lambda: 7).result(LONG_S) == 7
    assert preparers.longest_s > 0
    go.set()
    assert all(future.result(LONG_S) for future in stuck)
    preparers.close()


def test_a_cancelled_caller_waits_for_the_end_of_its_work() -> None:
    async def test() -> None:
        preparers, started, go = Preparers(), threading.Event(), threading.Event()
        preparation, thrown = Preparation(), []

        def work() -> int:
            started.set()
            go.wait(LONG_S)
            return 5

        caller = asyncio.ensure_future(preparers.run(preparation, work, discard=thrown.append))
        await asyncio.to_thread(started.wait, LONG_S)
        caller.cancel()
        await asyncio.sleep(0.05)
        assert not caller.done(), "the thread still works for it"
        with pytest.raises(GivenUp):
            preparation.go_on()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert thrown == [5], "what came of it is not lost"
        preparers.close()

    asyncio.run(test())


def test_what_waits_is_never_begun_once_it_is_given_up() -> None:
    async def test() -> None:
        preparers, go = Preparers(light=1, heavy=1), threading.Event()
        first = asyncio.ensure_future(preparers.run(Preparation(), lambda: go.wait(LONG_S)))
        begun: list[int] = []
        callers = [
            asyncio.ensure_future(preparers.run(Preparation(), lambda: begun.append(1))) for _ in range(20)
        ]
        await asyncio.sleep(0.05)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers, timeout=LONG_S)
        assert all(caller.cancelled() for caller in callers), "they don't wait for the one before them"
        go.set()
        assert await first
        assert not begun

    asyncio.run(test())


def test_a_deadline_ends_preparation() -> None:
    with pytest.raises(DeadlineExceeded, match="deadline of 0 s"):
        Preparation(0.0).go_on()
    preparation = Preparation(100.0)
    preparation.go_on()
    left_s = preparation.left_s()
    assert left_s is not None
    assert 0 < left_s <= 100
    assert Preparation().left_s() is None
