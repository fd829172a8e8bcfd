"""An engine that says what a test tells it to, and checks of what the server makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from snugvl.core.messages import Delta, Logprob, Request, TokenLogprob, Usage
from tests.server.fake import FakeService, FakeStream

# Fields that we add to OpenAI's; the name in events of whole arguments, which their types had before SDK 3.
OURS = {"image_tokens", "store", "reasoning_content", "reasoning", "name"}

Model = TypeVar("Model", bound=BaseModel)


@dataclass
class Scripted(FakeService):
    """`answer`: what a request is answered with. `open`: streams that were not closed."""

    answer: Callable[[Request], Sequence[Delta | Exception]] = lambda request: says("Hello", " there")
    open: set[FakeStream] = field(default_factory=set)

    async def submit(self, request: Request) -> FakeStream:
        self.requests.append(request)
        steps = (each if isinstance(each, Exception) else (each,) for each in self.answer(request))
        stream = FakeStream(steps, left=self.open.discard)
        self.open.add(stream)
        return stream

    @property
    def last(self) -> Request:
        """The request that came last."""
        return self.requests[-1]


def says(*pieces: str, choice: int = 0, finish: str = "stop", last: bool = True) -> list[Delta]:
    """Deltas of one choice. `last`: no other choice ends after it, so it carries the usage."""
    usage = Usage(7, len(pieces), 2) if last else None
    return [
        *(Delta(piece, choice) for piece in pieces),
        Delta("", choice, finish_reason=finish, usage=usage),  # type: ignore[arg-type]
    ]


def token(text: str, logprob: float, *others: tuple[str, float]) -> Logprob:
    """A token with its alternatives."""
    top = tuple(TokenLogprob(other, other.encode(), value) for other, value in others)
    return Logprob(text, text.encode(), logprob, top)


def strict(kind: type[Model], value: dict[str, Any]) -> Model:
    """`value` as one of OpenAI's types, with exactly its types and no fields that it doesn't have."""
    parsed = kind.model_validate(value, strict=True)
    assert unknown(parsed) <= OURS, unknown(parsed)
    return parsed


def unknown(value: object) -> set[str]:
    """Names of fields below `value` that its types don't have."""
    if isinstance(value, BaseModel):
        found = set(value.model_extra or {})
        return found.union(*(unknown(getattr(value, name)) for name in type(value).model_fields))
    if isinstance(value, list):
        return set().union(*map(unknown, value))
    return set()
