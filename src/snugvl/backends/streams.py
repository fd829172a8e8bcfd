"""What every engine in this process shares: streams, refusals, and how tokens reach their requests."""

import logging
from collections.abc import AsyncIterator, Callable, Iterator

from snugvl.backends.mailbox import OneAnswer
from snugvl.backends.receiver import Receiver
from snugvl.core.messages import Delta
from snugvl.engine.request import TokenOutput
from snugvl.errors import ENDINGS, EngineError, engine_failed

logger = logging.getLogger(__name__)


def fail_all(receivers: dict[str, Receiver], error: EngineError) -> None:
    """End every request with an error."""
    for receiver in receivers.values():
        receiver.fail(error)
    receivers.clear()


def deliver(
    abort: Callable[[str, int | None], object], receivers: dict[str, Receiver], output: TokenOutput
) -> None:
    """Hand a token to its request, in the engine's thread. What fails there ends that request alone.

    `abort` is told id and choice at a stop string; the id and None where all choices are to end.
    """
    receiver = receivers.get(output.request_id)
    if receiver is None:
        return
    try:
        if receiver.receive(output):
            abort(output.request_id, output.choice)
    except ENDINGS:
        raise
    except BaseException as error:  # what Rust panics at is no Exception
        logger.exception("an answer's text can't be made")
        receiver.fail(engine_failed(error))
        abort(output.request_id, None)
    if receiver.done:
        del receivers[output.request_id]


class ReceiverStream(OneAnswer):
    """The answer of an engine in this process."""

    def __init__(self, abort: Callable[[], object], receiver: Receiver) -> None:
        super().__init__(receiver.prompt_tokens, abort)
        self._mailbox = receiver.mailbox

    def __iter__(self) -> Iterator[Delta]:
        while (delta := self._mailbox.get()) is not None:
            yield delta
        self._open = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (delta := await self._mailbox.get_async()) is not None:
            yield delta
        self._open = False

    def forward(self, put: Callable[[Delta], None], end: Callable[[Exception | None], None]) -> None:
        """Hand every delta to `put` and the end to `end`, in place of reading; see `Mailbox.forward`."""
        self._mailbox.forward(put, end)
