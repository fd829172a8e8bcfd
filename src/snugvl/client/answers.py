"""A server's answers as the types that a loaded model returns. Unknown fields of newer servers are
ignored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Delta, Logprob, TokenLogprob, Usage
from snugvl.core.service import Health, Load
from snugvl.errors import EngineError
from snugvl.tasks.results import Reply, Result

R = TypeVar("R", bound=Result)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory and load of a server's engine at one moment. `at`: `time.time()` seconds of the server's clock;
    None, as `ledger`, before the engine was ready."""

    at: float | None
    ledger: Ledger | None
    load: Load
    health: Health


def understood(read: Callable[[Any], T], value: Any) -> T:
    """The result of `read(value)`.

    Raises:
        EngineError: the answer isn't one of snugvl's.
    """
    try:
        return read(value)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            "the answer is not one that this version of snugvl knows "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); is it a snugvl server of this version?"
        ) from error


def result_reader(kind: type[R]) -> Callable[[Any], R]:
    """A reader of a task's result."""
    return lambda value: kind.model_validate(
        {name: value[name] for name in kind.model_fields if name in value}
    )


def task_deltas(event: Any) -> tuple[Delta, ...]:
    """Deltas of one event of a streamed task: text, or the result that ends it."""
    if "delta" in event:
        return (Delta(event["delta"]),)
    if "result" not in event:
        return ()
    result = result_reader(Result)(event["result"])
    return (Delta("", finish_reason="length" if result.truncated else "stop", usage=result.usage),)


def reply(value: Any) -> Reply:
    """Reply of a chat completion: its first choice."""
    choice = value["choices"][0]
    finish = _finish(choice["finish_reason"]) or "stop"
    return Reply(text=choice["message"]["content"] or "", finish_reason=finish, usage=_usage(value))


def chat_deltas(chunk: Any) -> tuple[Delta, ...]:
    """Deltas of one chunk of a streamed chat completion."""
    deltas = [
        Delta(
            choice["delta"].get("content") or "",
            choice["index"],
            _logprobs(choice.get("logprobs")),
            _finish(choice.get("finish_reason")),
            reasoning=choice["delta"].get("reasoning_content") or "",
        )
        for choice in chunk["choices"]
    ]
    if usage := _usage(chunk):
        deltas.append(Delta("", usage=usage))
    return tuple(deltas)


def model_names(value: Any) -> tuple[str, ...]:
    """Names in an answer of `/v1/models`."""
    return tuple(model["id"] for model in value["data"])


def health(value: Any) -> Health:
    """Health in an answer of `/health`."""
    return Health(**_known(Health, value))


def memory(value: Any) -> Memory:
    """Memory in an answer of `/memory`."""
    ledger = value.get("ledger")
    load = Load(**_known(Load, value.get("load") or {}))
    return Memory(value.get("at"), _ledger(ledger) if ledger else None, load, health(value["health"]))


def _ledger(value: Any) -> Ledger:
    rows = tuple(
        LedgerRow(**_known(LedgerRow, row) | {"kind": Kind(row.get("kind", ""))}) for row in value["rows"]
    )
    return Ledger(**_known(Ledger, value) | {"rows": rows})


def _known(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(kind)}
    return {name: item for name, item in value.items() if name in names}


def _finish(reason: str | None) -> Literal["stop", "length", "abort"] | None:
    if reason is None or reason == "length":
        return "length" if reason else None
    return "stop"


def _usage(value: Any) -> Usage | None:
    usage = value.get("usage")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("image_tokens") or 0)


def _logprobs(value: Any) -> tuple[Logprob, ...]:
    return tuple(
        Logprob(token.token, token.bytes, token.logprob, tuple(map(_token, item["top_logprobs"])))
        for item in (value or {}).get("content") or ()
        for token in [_token(item)]
    )


def _token(item: Any) -> TokenLogprob:
    raw = item.get("bytes")
    return TokenLogprob(item["token"], bytes(raw) if raw else item["token"].encode(), item["logprob"])
