"""Items arrive in order and once, read or forwarded, also from another thread."""

import threading

import pytest

from snugvl.backends.mailbox import Mailbox


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
