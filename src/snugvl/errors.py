"""Every error snugvl raises on purpose.

Each says what is wrong, with which value, and what to do. The command line prints the message on one
line and leaves with `exit_code`; the server answers with `http_status`. Anything that is not a
`SnugvlError` is a bug of ours.

    SnugvlError                    500  1
    ├── InputError                 400  3   what the user sent can't be used
    │   ├── ImageError             400  3   not an image, truncated, of several pages, …
    │   │   └── ImageTooLarge      413  3   more bytes or pixels than allowed
    │   ├── RequestError           400  3   a sampling parameter, a message, a prompt
    │   │   ├── WrongType          400  3   an argument of a type that isn't taken; also a TypeError
    │   │   └── RequestTooLarge    400  3   more tokens than the context or the KV cache holds
    │   ├── BodyTooLarge           413  3   a request body of too many bytes
    │   ├── Unauthorized           401  3   no API key, or a wrong one
    │   ├── ModelNotServed         404  3   a server was asked for a model it doesn't serve
    │   └── RateLimited            429  3   one API key sent too much
    ├── CheckpointError            500  4   a file of the checkpoint is corrupt, truncated or foreign
    │   ├── CheckpointNotFound     404  4
    │   └── UnsupportedModel       400  4   a readable checkpoint of an architecture we don't run
    ├── DoesNotFit                 507  5   not enough memory for what was asked
    ├── OutputError                502  6   the model's answer isn't what the task asked for
    └── EngineError                500  1   the engine failed; running requests end with this
        ├── QueueFull              429  1
        ├── DeadlineExceeded       504  1
        └── EngineUnavailable      503  1   starting, restarting, draining or given up
            └── OutOfMemory        503  1   not enough device memory for this request now, even alone

Exit code 2 is a usage error of the command line, 7 a batch in which some files failed.
"""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from typing import ClassVar, Final

# What is meant for a thread or the whole process, not for one request. Any other `BaseException` is a fault
# like others: what Rust panics at is no `Exception`.
ENDINGS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit)
# Packages of which frames lie between a program and what warns: ours, and what our client asks through.
CALLED: Final = frozenset({"snugvl", "openai", "httpx", "httpx2"})
SHORT: Final = 200  # characters of what a library says
LONG: Final = 2000  # characters of what is wrong with a checkpoint, two paths included
_ASKED: Final = re.compile(r"Tried to allocate ([\d.]+ (?:[KMGT]iB|bytes))")
_ALLOWED: Final = re.compile(r"([\d.]+ [KMGT]iB) allowed")


class SnugvlError(Exception):
    """Base of every error raised on purpose."""

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1


class SnugvlWarning(UserWarning):
    """Something was done, but not quite what was asked: one frame of an animation was looked at, say."""


def warn(text: str) -> None:
    """Issue a `SnugvlWarning` that points at the line of the program that called snugvl."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in CALLED:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, SnugvlWarning, stacklevel=level)


class InputError(SnugvlError):
    """Something that the user sent can't be used."""

    http_status = 400
    exit_code = 3


class ImageError(InputError):
    """The input isn't a picture we can decode. `field` names where in a request it was, if in one."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ImageTooLarge(ImageError):
    """More bytes or pixels than the limits allow; raised before decoding."""

    http_status = 413


class RequestError(InputError):
    """A field of a request is wrong. `field` names it where one field is to blame."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@contextmanager
def blamed(field: str) -> Iterator[None]:
    """Name `field` of the request in the block's errors about a picture or a field that name none yet."""
    try:
        yield
    except (ImageError, RequestError) as error:
        error.field = error.field or field
        raise


class WrongType(RequestError, TypeError):
    """An argument is of a type that isn't taken; says which are."""


class RequestTooLarge(RequestError):
    """The request needs more tokens than the context or the KV cache holds.

    400, as OpenAI's own: clients look for that, the code and the words that the server puts before ours.
    """


class BodyTooLarge(InputError):
    """A request body has more bytes than allowed."""

    http_status = 413


class Unauthorized(InputError):
    """No API key, or a wrong one."""

    http_status = 401


class ModelNotServed(InputError):
    """A server was asked for a model that it doesn't serve; the message names those it does."""

    http_status = 404


class RateLimited(InputError):
    """One API key sent too much. `retry_after_s`: seconds until there is room."""

    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CheckpointError(SnugvlError):
    """A file of the checkpoint is missing, corrupt, truncated or foreign. Its message is cut to `LONG`."""

    exit_code = 4

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= LONG else message[:LONG] + " …")


class CheckpointNotFound(CheckpointError):
    """No checkpoint under that name."""

    http_status = 404


class UnsupportedModel(CheckpointError):
    """A readable checkpoint of an architecture or format this engine doesn't run."""

    http_status = 400


class DoesNotFit(SnugvlError):
    """Not enough memory for what was asked."""

    http_status = 507
    exit_code = 5


class OutputError(SnugvlError):
    """The model's answer isn't what the task asked for. `text` holds the answer."""

    http_status = 502
    exit_code = 6

    def __init__(self, message: str, *, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class EngineError(SnugvlError):
    """The engine failed; every request it was running ends with this."""


class QueueFull(EngineError):
    """Too many requests are waiting."""

    http_status = 429
    retry_after_s: ClassVar[float] = 1.0


class DeadlineExceeded(EngineError):
    """The request's deadline passed before it finished."""

    http_status = 504


class EngineUnavailable(EngineError):
    """The engine takes no requests now. `retry_after_s`: seconds after which to try again."""

    http_status = 503

    def __init__(self, message: str, *, retry_after_s: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutOfMemory(EngineUnavailable):
    """A step of this request ran out of device memory, even with nothing beside it. The engine goes on."""


def engine_failed(error: BaseException, what: str = "the engine failed") -> EngineError:
    """An `EngineError` for an exception of a library, in one line for users; the caller logs the whole of it.

    Torch's remarks on other processes and on its own settings are left out.
    """
    kind, text = type(error).__name__, str(error).strip()
    if "out of memory" in text:
        asked, allowed = _ASKED.search(text), _ALLOWED.search(text)
        numbers = [f"{asked[1]} asked for"] if asked else []
        numbers += [f"{allowed[1]} allowed in all"] if allowed else []
        told = f" ({', '.join(numbers)})" if numbers else ""
        return EngineError(f"{what}: out of memory{told}; free some, or send less at once; the log says more")
    line = text.splitlines()[0] if text else ""
    return EngineError(f"{what}: {kind}: {line if len(line) <= SHORT else line[:SHORT] + ' …'}")


def torn(error: BaseException | None) -> str | None:
    """Advice where `error` is Python's at a `.pyc` that a full disk or a crash left damaged; else None.

    It compiles anew where the head of one is wrong, but not where the rest is.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)] if error is not None else []
    path = frames[-1].f_locals.get("bytecode_path") if frames else None
    path = path or getattr(error, "path", None)  # of an ImportError, whose frames lack the last
    if not str(path).endswith(".pyc"):
        return None
    return f"{path}, which Python keeps of what it has compiled, is damaged; delete it"


# OpenAI's `code` of errors over HTTP, which a server writes and a client reads. The first class that an error
# is an instance of decides.
CODES: Final[Mapping[str, type[SnugvlError]]] = {
    "invalid_api_key": Unauthorized,
    "model_not_found": ModelNotServed,
    "context_length_exceeded": RequestTooLarge,
    "image_too_large": ImageTooLarge,
    "invalid_image": ImageError,
    "request_too_large": BodyTooLarge,
    "rate_limit_exceeded": RateLimited,
    "queue_full": QueueFull,
    "deadline_exceeded": DeadlineExceeded,
    "out_of_memory": OutOfMemory,
    "engine_unavailable": EngineUnavailable,
    "invalid_model_output": OutputError,
}
