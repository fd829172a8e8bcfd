"""A child engine's service in a thread: whatever stops its loop, nobody who asks waits for ever."""

from typing import Any, cast

import pytest

from snugvl.backends.llamacpp.loading import ChildBackend
from snugvl.core.messages import Request, user
from tests.server.fake import FakeService, Script


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_loop_that_is_stopped_goes_on(error: type[BaseException]) -> None:
    def stop() -> None:
        raise error

    backend = ChildBackend(lambda: cast(Any, FakeService(Script(("hello",)))))
    backend._loop.call_soon_threadsafe(stop)
    stream = backend.submit(Request((user("hello"),)))
    assert [delta.text for delta in stream] == ["hello", ""]
    backend.close()
    assert not backend._thread.is_alive()
