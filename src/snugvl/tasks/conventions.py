"""How each family of models is spoken to, and how it writes boxes: chosen by the network's architecture.

    family       boxes                                        counted in                      first
    Qwen3-VL     {"bbox_2d": […], "label": "…"}               thousandths of the image        x
    Qwen2.5-VL   {"bbox_2d": […], "label": "…"}               pixels of the resized image     x
    InternVL     <ref>…</ref><box>[[…], …]</box>              thousandths                     x
    Gemma 4      {"box_2d": […], "label": "…"}                thousandths                     y
    PaliGemma    <loc0000><loc0000><loc0000><loc0000> … ; …   1024ths                         y
    Gemma 3, SmolVLM                                          give no boxes

Sources: Qwen3-VL's and Qwen2.5-VL's cookbooks (spatial_understanding.ipynb, 2d_grounding.ipynb) and, for the
pixels, section 2 of "Qwen2.5-VL Technical Report" (arXiv 2502.13923); Qwen3.5 keeps Qwen3-VL's form.
InternVL's "Chat data format" (its documentation, "Grounding / Detection data"). Gemma 4: Google's "Image
understanding" and Hugging Face's "Welcome Gemma 4". PaliGemma: Google's "PaliGemma prompt and system
instructions" and big_vision's README. Gemma 3: Google's documentation gives it no boxes and its team says
that they are no trained ability (discussion 38 of google/gemma-3-4b-it). SmolVLM: its card names captions,
questions and stories, no boxes.

An architecture that isn't here is spoken to as Qwen3-VL is and taken to count in thousandths, x first, unless
its answer uses `box_2d`: the commonest form today, and an assumption.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from snugvl.checkpoint.resize import smart_resize
from snugvl.core.messages import Capabilities, Grammar
from snugvl.errors import RequestError
from snugvl.tasks import boxes, grammar, prompts

# Of Qwen2.5-VL's preprocessor_config.json, for an engine that doesn't tell its own.
QWEN2_5_FACTOR: Final = 28
QWEN2_5_PIXELS: Final = (3_136, 12_845_056)

Grid = Callable[[tuple[int, int], Capabilities, int | None], tuple[float, float]]
"""From an image's width and height, the model, and the request's `max_pixels`: what the model counts to."""


@dataclass(frozen=True, slots=True)
class Convention:
    """One family's words and boxes.

    Attributes:
        family: as people call it.
        architectures: as checkpoints name it.
        named: the prompt that asks for boxes of named objects; None: the family gives no boxes.
        everything: the prompt that asks for boxes of every object; None: it finds named ones only.
        marks: control tokens of the model in its prompts.
        reserved: characters that a name can't hold, because the prompt or the answer would be misread.
        grammar: what the answer must look like; None where its marks are special tokens, which a grammar
            of text can't spell.
        read: finds the boxes in an answer.
        grid: what the boxes' numbers count to, along the width and along the height.
        captions, question: what else is said in other words.
        scenes: whether it follows the instruction to answer with a scene as JSON.
    """

    family: str
    architectures: tuple[str, ...]
    named: Callable[[Sequence[str]], str] | None = None
    everything: str | None = None
    marks: tuple[str, ...] = ()
    reserved: str = ""
    grammar: Grammar | None = None
    read: Callable[[str], boxes.Reading] = boxes.from_json
    grid: Grid = lambda size, capabilities, max_pixels: (1000.0, 1000.0)
    captions: Mapping[prompts.Detail, str] = field(default_factory=lambda: prompts.CAPTION)
    question: str = "{}"
    scenes: bool = True

    def detection(self, names: Sequence[str], model: str) -> str:
        """The prompt that asks where the objects in `names` are, or where everything is.

        Raises:
            RequestError: the family gives no boxes, or needs names; or a name that it can't be given.
        """
        if self.named is None:
            raise RequestError(
                f"{model} is a {self.family} model, which does not give boxes; "
                f"models that do: {', '.join(grounding())}",
                field="model",
            )
        for name in names:
            if wrong := sorted(set(name) & set(self.reserved)):
                raise RequestError(
                    f"{self.family} can't be asked for {name!r}: {' and '.join(wrong)} separate its boxes",
                    field="objects",
                )
        if names:
            return self.named(names)
        if self.everything is None:
            raise RequestError(f"{self.family} finds only objects that are named; name some", field="objects")
        return self.everything


def convention_of(capabilities: Capabilities) -> Convention:
    """The convention of a loaded model."""
    return _BY_ARCHITECTURE.get(capabilities.architecture, QWEN3_VL)


def tasks_of(capabilities: Capabilities) -> tuple[str, ...]:
    """Which of our tasks about a picture a loaded model can do; none for a model of text alone."""
    if not capabilities.images:
        return ()
    convention = convention_of(capabilities)
    can = {"ask": True, "caption": True, "scene": convention.scenes, "detect": convention.named is not None}
    return tuple(task for task, able in can.items() if able)


def grounding() -> tuple[str, ...]:
    """Families that give boxes."""
    return tuple(convention.family for convention in CONVENTIONS if convention.named is not None)


def _resized(
    size: tuple[int, int], capabilities: Capabilities, max_pixels: int | None
) -> tuple[float, float]:
    """Width and height of the image as Qwen2.5-VL reads it: its boxes are pixels of that one."""
    least = capabilities.min_pixels or QWEN2_5_PIXELS[0]
    most = capabilities.max_pixels or QWEN2_5_PIXELS[1]
    if max_pixels is not None:
        most = min(most, max_pixels)
    height, width = smart_resize(
        size[1],
        size[0],
        factor=QWEN2_5_FACTOR,
        min_pixels=min(least, most),
        max_pixels=most,
    )
    return float(width), float(height)


def _internvl(names: Sequence[str]) -> str:
    """The documented sentence for one object; for several, the documented one for detection with tags."""
    refs = ", ".join(f"<ref>{name}</ref>" for name in names)
    if len(names) == 1:
        return f"Please provide the bounding box coordinate of the region this sentence describes: {refs}"
    return f"Please detect and label all of these in the following image and mark their positions: {refs}"


def _gemma(names: Sequence[str]) -> str:
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"detect {listed}, output only ```json"


def _qwen2_5(names: Sequence[str]) -> str:
    return (
        f"Locate every instance of the following categories: {', '.join(names)}. "
        "Output their bbox_2d coordinates and labels using JSON format."
    )


QWEN3_VL: Final = Convention(
    "Qwen3-VL",
    ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    named=prompts.detect,
    everything=prompts.DETECT_ALL,
    grammar=grammar.BOXES,
)
CONVENTIONS: Final = (
    QWEN3_VL,
    replace(
        QWEN3_VL,
        family="Qwen3.5",
        architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    ),
    Convention(
        "Qwen2.5-VL",
        ("Qwen2_5_VLForConditionalGeneration",),
        named=_qwen2_5,
        everything="Locate every object. Output their bbox_2d coordinates and labels using JSON format.",
        grammar=grammar.PIXEL_BOXES,
        grid=_resized,
    ),
    Convention(
        "InternVL",
        ("InternVLForConditionalGeneration", "InternVLChatModel"),
        named=_internvl,
        everything="Please detect and label all objects in the following image and mark their positions.",
        marks=("<ref>", "</ref>"),
        reserved="<>[]",
        read=boxes.from_tags,
    ),
    Convention(
        "Gemma 4",
        ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
        named=_gemma,
        everything="detect all objects, output only ```json",
        grammar=grammar.Y_FIRST_BOXES,
    ),
    Convention("Gemma 3", ("Gemma3ForConditionalGeneration", "Gemma3nForConditionalGeneration")),
    Convention("SmolVLM", ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration")),
    Convention(
        "PaliGemma",
        ("PaliGemmaForConditionalGeneration",),
        named=lambda names: f"detect {' ; '.join(names)}",
        reserved="<>;",
        read=boxes.from_locations,
        grid=lambda size, capabilities, max_pixels: (1024.0, 1024.0),
        captions={"short": "caption en", "detailed": "describe en"},
        question="answer en {}",
        scenes=False,
    ),
)
_BY_ARCHITECTURE: Final = {
    architecture: convention for convention in CONVENTIONS for architecture in convention.architectures
}
