"""The context of every handler: the engine, the settings, the media, the metrics, the validation.

A keyword that can't be enforced token by token is left out of a grammar (`forms.py`), so that the answer may
break it. Its text, or the arguments of its calls, are validated against the whole schema in a process of its
own (`inputs.valid`), and what doesn't hold is a warning (`AnswerCheck` of `generation.py`): in the answer's
header where it is whole, in a comment before the last events of a stream, in the log in any case.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Final

from starlette.requests import HTTPConnection

from snugvl.core.messages import Capabilities, ToolForm, ToolUse
from snugvl.core.service import EngineService, check_number, check_sight
from snugvl.errors import EngineUnavailable, ModelNotServed
from snugvl.inputs.tools.forms import call_parser
from snugvl.inputs.tools.parser import CallParser
from snugvl.inputs.trials import PROCESSES, Trials
from snugvl.server.media.loading import MediaLoader, RequestMedia
from snugvl.server.metrics import Metrics, RequestRecord
from snugvl.server.settings import ServerSettings

LIMIT_S: Final = 10.0  # for one answer, waiting included
ANSWER: Final = "the answer"
LATEST: Final = ":latest"
log = logging.getLogger("snugvl.server")


class _Left(Exception):
    """The client has left: no answer is waited for."""


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


@dataclass(frozen=True, slots=True)
class Context:
    """The objects that all requests of one server share."""

    service: EngineService
    settings: ServerSettings
    media: MediaLoader
    metrics: Metrics = field(init=False)
    validation: Validation = field(init=False, default_factory=Validation)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", Metrics(self.service))
        self.media.before = self._check_sight
        self.media.before_all = self._check_number

    def media_to_count(
        self, record: RequestRecord, *, attachments: Mapping[str, bytes] | None = None
    ) -> RequestMedia:
        """Pictures of a conversation that is only counted: by their sizes, where the engine counts so."""
        capabilities = self.service.capabilities
        sizes = capabilities is not None and capabilities.counts_by_size
        return RequestMedia(self.media, record, attachments=attachments, counted=True, sizes=sizes)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the loaded model.

        Raises:
            EngineUnavailable: it was not ready yet.
        """
        capabilities = self.service.capabilities
        if capabilities is None:
            health = self.service.health
            raise EngineUnavailable(health.detail, retry_after_s=health.retry_after_s or 2.0)
        return capabilities

    def call_parser(self, tools: ToolUse | None) -> CallParser | None:
        """Reads the calls of one answer, in the form of the loaded model; None where no tools are offered."""
        if tools is None:
            return None
        known = self.service.capabilities  # None: not ready yet, so the engine refuses the request
        return call_parser(ToolForm() if known is None else known.tool_form, tools)

    def _check_sight(self, field: str) -> None:
        """Refuse a picture before it is fetched where the model is known not to see."""
        if self.service.capabilities is not None:
            check_sight(self.service.capabilities, field)

    def _check_number(self, fields: Sequence[str]) -> None:
        """Refuse more pictures than the model is known to take, before the first is fetched."""
        if self.service.capabilities is not None:
            check_number(self.service.capabilities, fields)

    def check_model(self, name: str | None) -> str:
        """Check a request's model and return the name to answer with; without one, the first served.

        Ollama's ":latest" may follow a name in every protocol: clients find the names in its /api/tags.

        Raises:
            ModelNotServed: this server doesn't serve it; the message names those it does.
        """
        names = self.settings.names
        if name is None:
            return names[0]
        if name in names or name.removesuffix(LATEST) in names:
            return name
        served = " or ".join(map(repr, names))
        raise ModelNotServed(f"the model {name[:100]!r} is not served here; use {served}")


def context_of(connection: HTTPConnection) -> Context:
    """The context of the app that handles `connection`."""
    context = connection.app.state.context
    assert isinstance(context, Context)
    return context
