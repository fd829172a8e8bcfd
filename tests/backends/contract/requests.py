"""Requests that every engine is asked, and what their answers hold."""

from typing import Any

from PIL import Image, ImageDraw

from snugvl.core.messages import Delta, Grammar, Request, Tool, ToolUse, user
from snugvl.core.sampling import SamplingParams

QUESTION = "What is in this image?"
SCHEMA = (
    '{"type": "object", "properties": {"color": {"enum": ["red", "blue"]}, '
    '"n": {"type": "integer", "minimum": 0, "maximum": 99}}, '
    '"required": ["color", "n"], "additionalProperties": false}'
)
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
TOOLS = ToolUse((Tool("get_weather", "Weather", CITY), Tool("now", "Time")), "required", parallel=False)


def picture(size: tuple[int, int] = (128, 96), color: str = "red") -> Image.Image:
    """A disc on white."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((1, 8, 1 + size[0] // 2, 8 + size[1] // 2), fill=color)
    return image


def asked(*parts: Any, **sampling: Any) -> Request:
    """A question, or `parts`; 24 tokens whatever the network would end with."""
    values = {"max_tokens": 24, "ignore_eos": True} | sampling
    return Request((user(*(parts or (QUESTION,))),), SamplingParams(**values))


def constrained(grammar: Grammar, **sampling: Any) -> Request:
    """The question with an answer of a form."""
    return Request((user(QUESTION),), SamplingParams(**{"max_tokens": 200} | sampling), grammar=grammar)


def texts(deltas: list[Delta]) -> list[str]:
    """The text of each choice."""
    found: dict[int, str] = {}
    for delta in deltas:
        found[delta.choice] = found.get(delta.choice, "") + delta.text
    return [found[choice] for choice in sorted(found)]


def logprobs(deltas: list[Delta]) -> list[Any]:
    """Of every token, in order."""
    return [token for delta in deltas for token in delta.logprobs]
