"""What a grammar couldn't enforce of an answer, validated when the answer is complete.

A keyword that can't be enforced token by token is left out (`forms.py`), so that the answer may break it. Its
text, or the arguments of its calls, are validated against the whole schema in a process of its own
(`inputs.valid`), and what doesn't hold is a warning: in the answer's header where it is whole, in a comment
before the last events of a stream (`streaming.py`), in the log in any case.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from threading import Event
from typing import Any, Final

from snugvl.core.messages import ToolCall
from snugvl.inputs.trials import PROCESSES, Trials
from snugvl.server.record import RequestRecord

LIMIT_S: Final = 10.0  # for one answer, waiting included
ANSWER: Final = "the answer"
log = logging.getLogger("snugvl.server")


class _Left(Exception):
    """The result is no longer wanted."""


class Validation:
    """Validates answers, a few at a time; its processes start when the first one is needed."""

    def __init__(self) -> None:
        late = "not validated: it takes too much time or memory"
        self._trials = Trials(worker="snugvl.inputs.valid", overrun=late)
        self._turns = asyncio.Semaphore(PROCESSES)

    async def broken(
        self, schemas: Mapping[str, Mapping[str, Any]], values: list[tuple[str, str]]
    ) -> list[str]:
        """A line for each value that doesn't follow its schema. `values`: JSON and its schema's name."""
        question = json.dumps({"schemas": schemas, "values": values})
        left = Event()

        def go_on() -> None:
            if left.is_set():
                raise _Left

        try:
            async with asyncio.timeout(LIMIT_S), self._turns:
                verdict = await asyncio.to_thread(self._trials.check, question, go_on)
        except TimeoutError:
            return [f"not validated: it took more than {LIMIT_S:g} s"]
        finally:
            left.set()
        return verdict.error.splitlines()


class AnswerCheck:
    """The choices of one answer, validated against the schemas that its request's notes call unenforced."""

    def __init__(self, validation: Validation, record: RequestRecord) -> None:
        self._validation = validation
        self._record = record
        schemas = record.notes.unenforced
        self._schemas = {ANSWER if name is None else f"{name}()": schema for name, schema in schemas.items()}

    async def warn(self, choices: Sequence[tuple[str, Sequence[ToolCall]]]) -> None:
        """Warn of what doesn't hold. `choices`: the text and the calls of each, complete."""
        values: list[tuple[str, str]] = []
        for text, calls in choices:
            found = [(f"{call.name}()", call.arguments) for call in calls] or [(ANSWER, text)]
            values += [(name, value) for name, value in found if name in self._schemas]
        for line in await self._validation.broken(self._schemas, values) if values else ():
            log.info("%s %s", self._record.id, self._record.notes.warn(line))
