"""Items arrive in order and once, read or forwarded, also from another thread."""

import asyncio
import threading

import pytest

from snugvl.backends.mailbox import Inbox, Mailbox, RemoteStream


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
