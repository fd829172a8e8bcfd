"""Items arrive in order and once, read or forwarded, also from another thread."""

import asyncio
import threading
import traceback

import pytest

from snugvl.backends.engine_thread import Mailbox
from snugvl.backends.inbox import Inbox, RemoteStream
from snugvl.errors import RequestError


def test_what_is_there_and_what_comes_is_forwarded_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    seen: list[object] = []
    mailbox.put(0)
    mailbox.forward(seen.append, lambda error: seen.append(("end", error)))
    sender = threading.Thread(target=lambda: [mailbox.put(item) for item in range(1, 100)])
    sender.start()
    sender.join()
    mailbox.close()
    mailbox.put(100)
    mailbox.close(ValueError("late"))
    assert seen == [*range(100), ("end", None)]


def test_an_error_and_what_came_before_it_are_forwarded() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    error = ValueError("broken")
    mailbox.close(error)
    seen: list[object] = []
    mailbox.forward(seen.append, seen.append)
    assert seen == [1, error]


def test_one_error_that_ends_several_answers_is_raised_once_by_each_reader() -> None:
    """The same exception in several threads prints the frames of all of them, more each time it is read."""
    error = RequestError("the model was closed", field="messages")
    error.__cause__ = ValueError("why")
    boxes = [Mailbox[int]() for _ in range(2)]
    raised: list[BaseException] = []
    for box in boxes * 2:
        box.close(error)
        with pytest.raises(RequestError, match="the model was closed") as caught:
            box.get()
        raised.append(caught.value)
        assert caught.value.field == "messages"
        assert caught.value.__cause__ is error.__cause__
    assert len({id(each) for each in raised}) == 4
    assert error.__traceback__ is None
    depths = [len(list(traceback.walk_tb(each.__traceback__))) for each in raised]
    assert len(set(depths)) == 1


def test_an_error_that_can_not_be_copied_is_raised_as_it_is() -> None:
    class Odd(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} {second}")

    mailbox, odd = Mailbox[int](), Odd(1, 2)
    mailbox.close(odd)
    with pytest.raises(Odd) as caught:
        mailbox.get()
    assert caught.value is odd


def test_a_mailbox_is_forwarded_once() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.forward(print, print)
    with pytest.raises(AssertionError, match="once"):
        mailbox.forward(print, print)


def test_a_reader_whose_loop_has_closed_is_no_fault_of_whoever_fills_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the look whether it is open and the call it may close: that raised in the engine's thread."""
    mailbox: Mailbox[int] = Mailbox()
    loop = asyncio.new_event_loop()
    reader = loop.create_task(mailbox.get_async())
    loop.run_until_complete(asyncio.sleep(0))
    monkeypatch.setattr(loop, "is_closed", lambda: False)
    reader.cancel()
    loop.run_until_complete(asyncio.wait([reader]))
    loop.close()
    mailbox.put(1)
    mailbox.close()
    assert mailbox.get() == 1


def test_an_answer_that_is_dropped_when_its_loop_has_closed() -> None:
    async def test() -> RemoteStream:
        return RemoteStream(Inbox(), 1, lambda: None)

    asyncio.run(test()).close()
