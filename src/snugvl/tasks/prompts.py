"""The prompts of the tasks.

The same words go to every model, except where `conventions` has others for its family. `pocket` was trained
on exactly these, and they follow the wording of Qwen3-VL's own cookbooks (boxes as `bbox_2d` in thousandths
of the image), so change them only together with a new training of pocket.
"""

from collections.abc import Sequence
from typing import Literal

Detail = Literal["short", "detailed"]

CAPTION: dict[Detail, str] = {
    "short": "Describe this image in one sentence.",
    "detailed": "Describe this image in detail.",
}

SCENE = (
    'Analyse this image. Answer with JSON only: {"summary": "...", "setting": "...", '
    '"objects": [{"name": "...", "count": 1, "positions": ["..."]}], "text": ["..."], "relations": ["..."]}'
)

DETECT_ALL = "Locate every object in the image. Report bbox coordinates in JSON format."


def of_video(prompt: str) -> str:
    """The prompt about an image, reworded for a video."""
    return prompt.replace("this image", "this video")


def detect(names: Sequence[str]) -> str:
    """The detection prompt for the objects in `names`, or for every object when it is empty."""
    if not names:
        return DETECT_ALL
    return (
        "Locate every instance that belongs to the following categories: "
        f'"{", ".join(names)}". Report bbox coordinates in JSON format.'
    )
