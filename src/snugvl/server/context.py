"""The context of every handler: the engine, the settings, the media, the metrics, the validation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from snugvl.core.checks import check_number, check_sight
from snugvl.core.messages import Capabilities, ToolForm, ToolUse
from snugvl.core.service import EngineService
from snugvl.errors import EngineUnavailable, ModelNotServed
from snugvl.inputs.tools.forms import call_parser
from snugvl.inputs.tools.parser import CallParser
from snugvl.server.media.loading import MediaLoader, RequestMedia
from snugvl.server.metrics import Metrics
from snugvl.server.record import RequestRecord
from snugvl.server.settings import ServerSettings
from snugvl.server.validation import Validation


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

        Raises:
            ModelNotServed: this server doesn't serve it; the message names those it does.
        """
        names = self.settings.names
        if name is None or name in names:
            return name or names[0]
        served = " or ".join(map(repr, names))
        raise ModelNotServed(f"the model {name[:100]!r} is not served here; use {served}")


def context_of(connection: HTTPConnection) -> Context:
    """The context of the app that handles `connection`."""
    context = connection.app.state.context
    assert isinstance(context, Context)
    return context
