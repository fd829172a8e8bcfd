"""Every error snugvl raises on purpose.

Each says what is wrong, with which value, and what to do. The command line prints the message on one
line and leaves with `exit_code`; the server answers with `http_status`. Anything that is not a
`SnugvlError` is a bug of ours.

    SnugvlError                    500  1
    ├── InputError                 400  3   what the user sent can't be used
    │   ├── ImageError             400  3   not an image, truncated, animated beyond use, …
    │   │   └── ImageTooLarge      413  3   more bytes or pixels than allowed
    │   └── RequestError           400  3   a sampling parameter, a message, a prompt
    │       └── RequestTooLarge    413  3   more tokens than the context or the KV cache holds
    ├── CheckpointError            500  4   a file of the checkpoint is corrupt, truncated or foreign
    │   ├── CheckpointNotFound     404  4
    │   └── UnsupportedModel       400  4   a readable checkpoint of an architecture we don't run
    ├── DoesNotFit                 507  5   not enough memory for what was asked
    ├── OutputError                502  6   the model's answer isn't what the task asked for
    └── EngineError                500  1   the engine failed; running requests end with this
        ├── QueueFull              429  1
        └── DeadlineExceeded       504  1

Exit code 2 is a usage error of the command line, 7 a batch in which some files failed.
"""

from typing import ClassVar


class SnugvlError(Exception):
    """Base of every error raised on purpose."""

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1


class InputError(SnugvlError):
    """What the user sent can't be used."""

    http_status = 400
    exit_code = 3


class ImageError(InputError):
    """The input isn't a picture we can decode."""


class ImageTooLarge(ImageError):
    """More bytes or pixels than the limits allow; raised before decoding."""

    http_status = 413


class RequestError(InputError):
    """A field of a request is wrong. `field` names it where one field is to blame."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class RequestTooLarge(RequestError):
    """The request needs more tokens than the context or the KV cache holds."""

    http_status = 413


class CheckpointError(SnugvlError):
    """A file of the checkpoint is missing, corrupt, truncated or foreign."""

    exit_code = 4


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


class DeadlineExceeded(EngineError):
    """The request's deadline passed before it finished."""

    http_status = 504
