"""snugvl: vision-language models in the GPU memory people really have.

    import snugvl

    with snugvl.load("pocket") as model:
        print(model.caption("picture.png").text)

    with snugvl.Client("http://127.0.0.1:8000") as client:  # the same, on a server
        print(client.caption("picture.png").text)

The names below are the public ones. They are loaded when first used, so that importing snugvl (and
`snugvl --help`) costs neither torch nor anything else that is slow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from snugvl.errors import (
    BodyTooLarge,
    CheckpointError,
    CheckpointNotFound,
    DeadlineExceeded,
    DoesNotFit,
    EngineError,
    EngineUnavailable,
    ImageError,
    ImageTooLarge,
    InputError,
    ModelNotServed,
    OutOfMemory,
    OutputError,
    QueueFull,
    RateLimited,
    RequestError,
    RequestTooLarge,
    SnugvlError,
    Unauthorized,
    UnsupportedModel,
)
from snugvl.version import __version__

if TYPE_CHECKING:
    from snugvl.client import AsyncClient, Client
    from snugvl.core.messages import (
        Capabilities,
        Delta,
        Message,
        Picture,
        Request,
        Stream,
        Text,
        Usage,
        Video,
        user,
    )
    from snugvl.core.sampling import SamplingParams
    from snugvl.loading import load
    from snugvl.model import Model
    from snugvl.tasks.results import (
        Answer,
        Box,
        Caption,
        Detection,
        Detections,
        Reply,
        Scene,
        SceneObject,
    )

_LAZY = {
    "load": "loading",
    "Model": "model",
    "SamplingParams": "core.sampling",
    "AsyncClient": "client",
    "Client": "client",
    **dict.fromkeys(
        (
            "Capabilities",
            "Delta",
            "Message",
            "Picture",
            "Request",
            "Stream",
            "Text",
            "Usage",
            "Video",
            "user",
        ),
        "core.messages",
    ),
    **dict.fromkeys(
        ("Answer", "Box", "Caption", "Detection", "Detections", "Reply", "Scene", "SceneObject"),
        "tasks.results",
    ),
}

__all__ = [
    "Answer",
    "AsyncClient",
    "BodyTooLarge",
    "Box",
    "Capabilities",
    "Caption",
    "CheckpointError",
    "CheckpointNotFound",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "Detection",
    "Detections",
    "DoesNotFit",
    "EngineError",
    "EngineUnavailable",
    "ImageError",
    "ImageTooLarge",
    "InputError",
    "Message",
    "Model",
    "ModelNotServed",
    "OutOfMemory",
    "OutputError",
    "Picture",
    "QueueFull",
    "RateLimited",
    "Reply",
    "Request",
    "RequestError",
    "RequestTooLarge",
    "SamplingParams",
    "Scene",
    "SceneObject",
    "SnugvlError",
    "Stream",
    "Text",
    "Unauthorized",
    "UnsupportedModel",
    "Usage",
    "Video",
    "__version__",
    "load",
    "user",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'snugvl' has no attribute {name!r}")
    value = getattr(import_module(f"snugvl.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
