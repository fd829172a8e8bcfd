"""What every client talks about. Used by the scripts beside it, in an environment of their own.

    python openai_sdk.py SERVER WILLING PICTURE

SERVER has pocket behind it; WILLING is a server whose model calls a tool without being told to. A script
prints one JSON object:

    {"pieces": ["The", " circle", …], "second": "…",       # a conversation of two turns, streamed
     "structured": {"color": "red", "count": 1},          # an answer in the form of SCHEMA
     "call": {"name": "count_shapes", "arguments": {…}},   # a tool call
     "after": "…"}                                         # the answer to the tool's answer
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

SERVER, WILLING, PICTURE = sys.argv[1:4]
DATA = base64.b64encode(Path(PICTURE).read_bytes()).decode()
DATA_URL = f"data:image/png;base64,{DATA}"

FIRST = "Describe this image."
SECOND = "How many squares are there?"
STRUCTURE = "What color is the circle?"
TOOL_QUESTION = "How many circles are there?"
TOOL_ANSWER = "1 circle"

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"type": "string", "enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["color", "count"],
    "additionalProperties": False,
}
TOOL_NAME = "count_shapes"
TOOL_DESCRIPTION = "Counts the shapes of one kind."
TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"shape": {"type": "string", "enum": ["circle", "square", "triangle"]}},
    "required": ["shape"],
    "additionalProperties": False,
}
OPENAI_TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": TOOL_PARAMETERS},
}


def openai_content(text: str) -> list[dict[str, Any]]:
    """The picture and a text, as OpenAI writes them."""
    return [{"type": "image_url", "image_url": {"url": DATA_URL}}, {"type": "text", "text": text}]


def report(*, pieces: list[str], second: str, structured: Any, call: dict[str, Any], after: str) -> None:
    """Print the outcome."""
    outcome = {"pieces": pieces, "second": second, "structured": structured, "call": call, "after": after}
    print(json.dumps(outcome))


def report_loop(
    *, first: str, turns: list[dict[str, Any]], structured: Any = None, forced: dict[str, Any] | None = None
) -> None:
    """Print what a client of the extended group did.

    first: what pocket says of the picture.
    turns: of each turn of the willing server's conversation, `call` (`name` and `arguments`) and `after`,
        the answer to the tool's answer.
    structured: an answer in the form of SCHEMA, where the client has typed answers.
    forced: a call that was demanded of pocket, where the client can demand one.
    """
    outcome = {"first": first, "turns": turns, "structured": structured, "forced": forced}
    print(json.dumps({key: value for key, value in outcome.items() if value is not None}))


def as_call(name: str, arguments: Any) -> dict[str, Any]:
    """A tool call, its arguments parsed where the client leaves them as text."""
    return {
        "name": name,
        "arguments": json.loads(arguments) if isinstance(arguments, str) else dict(arguments),
    }
