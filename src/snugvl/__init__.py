"""snugvl: vision-language models in the GPU memory people really have.

    import snugvl

    with snugvl.load("pocket") as model:
        print(model.caption("picture.png"))

    with snugvl.Client("http://127.0.0.1:8000") as client:  # the same, on a server
        print(client.caption("picture.png"))

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
    SnugvlWarning,
    Unauthorized,
    UnsupportedModel,
    WrongType,
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
    )
    from snugvl.core.sampling import SamplingParams
    from snugvl.inputs.given import video
    from snugvl.inputs.talk import user
    from snugvl.loading import load
    from snugvl.model import Model
    from snugvl.tasks.conversation import AsyncConversation, Conversation
    from snugvl.tasks.results import Answer, Box, Caption, Detection, Detections, Reply, Scene, SceneObject
    from snugvl.tasks.surface import Tasks

_LAZY = {
    "load": "loading",
    "Model": "model",
    "SamplingParams": "core.sampling",
    "AsyncClient": "client",
    "Client": "client",
    "AsyncConversation": "tasks.conversation",
    "Conversation": "tasks.conversation",
    "Tasks": "tasks.surface",
    "user": "inputs.talk",
    "video": "inputs.given",
    **dict.fromkeys(
        ("Capabilities", "Delta", "Message", "Picture", "Request", "Stream", "Text", "Usage", "Video"),
        "core.messages",
    ),
    **dict.fromkeys(
        ("Answer", "Box", "Caption", "Detection", "Detections", "Reply", "Scene", "SceneObject"),
        "tasks.results",
    ),
}

__all__ = [
    "Answer", "AsyncClient", "AsyncConversation", "BodyTooLarge", "Box", "Capabilities", "Caption",
    "CheckpointError", "CheckpointNotFound", "Client", "Conversation", "DeadlineExceeded", "Delta",
    "Detection", "Detections", "DoesNotFit", "EngineError", "EngineUnavailable", "ImageError",
    "ImageTooLarge", "InputError", "Message", "Model", "ModelNotServed", "OutOfMemory", "OutputError",
    "Picture", "QueueFull", "RateLimited", "Reply", "Request", "RequestError", "RequestTooLarge",
    "SamplingParams", "Scene", "SceneObject", "SnugvlError", "SnugvlWarning", "Stream", "Tasks", "Text",
    "Unauthorized", "UnsupportedModel", "Usage", "Video", "WrongType", "__version__", "load", "user",
    "video",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        tasks = ("caption", "ask", "scene", "detect", "chat")
        from snugvl.core.guesses import hint as meant

        hint = f": a model has it: snugvl.load().{name}(…)" if name in tasks else meant(name)
        raise AttributeError(f"module 'snugvl' has no attribute {name!r}{hint}")
    value = getattr(import_module(f"snugvl.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
