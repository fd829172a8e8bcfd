"""Scene: summary, setting, objects with counts and positions, written text and relations."""

from typing import Any, Final

from snugvl.core.messages import Capabilities, Request, Video
from snugvl.core.sampling import SamplingParams
from snugvl.errors import OutputError, RequestError
from snugvl.tasks import conventions, prompts
from snugvl.tasks.ask import Shown, about
from snugvl.tasks.conventions import convention_of
from snugvl.tasks.parse import answer_text, find_json
from snugvl.tasks.results import Reply, Scene, SceneObject

MAX_TOKENS: Final = 1024
_KEYS: Final = frozenset({"summary", "setting", "objects", "text", "relations"})


def check(capabilities: Capabilities) -> None:
    """Refuse a model that can't be asked for JSON, before any picture is fetched.

    Raises:
        RequestError: its family only answers in words of its own.
    """
    convention = convention_of(capabilities)
    if not convention.scenes:
        raise RequestError(
            f"{capabilities.model} is a {convention.family} model, which can't answer with a scene; "
            "it captions, answers questions and detects",
            field="model",
        )


def request(
    image: Shown,
    capabilities: Capabilities,
    *,
    sampling: SamplingParams | None = None,
    max_pixels: int | None = None,
) -> Request:
    """Ask for an analysis of `image`, which may be a video.

    Raises:
        RequestError: as `check`.
    """
    check(capabilities)
    return about(
        [image],
        prompts.of_video(prompts.SCENE) if isinstance(image, Video) else prompts.SCENE,
        capabilities,
        MAX_TOKENS,
        sampling=sampling,
        max_pixels=max_pixels,
        grammar=conventions.SCENE,
    )


def result(reply: Reply) -> Scene:
    """The scene in `reply`, as far as it goes: a missing part is empty, an unknown one is left out.

    Raises:
        OutputError: the answer has no such object in it; it holds the text.
    """
    answer = answer_text(reply.text)
    for found in find_json(answer):
        value = found.value
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, dict) and _KEYS & value.keys():
            return Scene(
                summary=_sentence(value.get("summary")),
                setting=_sentence(value.get("setting")),
                objects=tuple(_objects(value.get("objects"))),
                text=_sentences(value.get("text")),
                relations=_sentences(value.get("relations")),
                truncated=reply.truncated or not found.complete,
                usage=reply.usage,
            )
    raise OutputError("the model didn't answer with a scene as JSON", text=reply.text)


def _objects(value: Any) -> list[SceneObject]:
    if isinstance(value, dict):  # {"cup": 2}
        value = [{"name": name, "count": count} for name, count in value.items()]
    objects = []
    for entry in value if isinstance(value, list) else [value]:
        fields = entry if isinstance(entry, dict) else {"name": entry}
        if name := _sentence(fields.get("name") or fields.get("label")):
            positions = fields.get("positions", fields.get("position"))
            objects.append(
                SceneObject(name=name, count=_count(fields.get("count")), positions=_sentences(positions))
            )
    return objects


def _count(value: Any) -> int:
    """The count that the model wrote; 1 where it wrote no usable one."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 10:
        return int(value)
    return int(value) if isinstance(value, int | float) and 0 <= value < 1e9 else 1


def _sentences(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(sentence for sentence in map(_sentence, values) if sentence)


def _sentence(value: Any) -> str:
    """The text of a JSON value where a sentence belongs: a scalar's, or a list's or object's parts joined."""
    if isinstance(value, list | dict):
        parts = value.values() if isinstance(value, dict) else value
        return ", ".join(part for part in map(_sentence, parts) if part)
    return "" if value is None or isinstance(value, bool) else " ".join(str(value).split())
