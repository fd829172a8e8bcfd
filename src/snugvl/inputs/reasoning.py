"""Reasoning of a model, told apart from its answer as it streams.

    prompt …<think>        reasoning </think> answer        a template that opens it, as Qwen3.5's may
    prompt …        <think> reasoning </think> answer       a model that opens it itself, as Qwen3 does

The forms are those of Qwen's chat templates, which vLLM's parser `qwen3` reads alike. An answer that is cut
while the model thinks is all reasoning: its text is empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from snugvl.core.messages import Request, Text
from snugvl.core.options import ThinkingName

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
VARIABLE: Final = "enable_thinking"  # of chat templates that can be told
EFFORT: Final = "reasoning_effort"  # OpenAI's word for it, which some templates also know
UNTHINKING: Final = ("none", "minimal")  # efforts of a model that thinks or doesn't


def thinks(template: str) -> bool:
    """Whether a chat template knows of reasoning."""
    return CLOSE in template


def opened(prompt: str) -> bool:
    """Whether the model's answer begins inside the reasoning."""
    return prompt.rstrip().endswith(OPEN)


@dataclass(frozen=True, slots=True)
class ThinkingDefault:
    """Whether a loaded model thinks where a request doesn't say.

    `pictures`: about pictures, by the catalogue; None: as its template has it.
    """

    said: ThinkingName = "auto"
    pictures: bool | None = None

    def template(self, request: Request) -> Mapping[str, Any]:
        """The request's variables of the chat template, and whether to think where that is decided here."""
        if VARIABLE in request.template:
            return request.template
        effort = request.template.get(EFFORT)
        wanted = None if self.said == "auto" else self.said == "on"
        if effort is not None:
            wanted = effort not in UNTHINKING
        parts = (part for message in request.messages for part in message.content)
        if request.formed or (request.tools is not None and request.tools.choice != "auto"):
            wanted = False  # a grammar begins with the answer, or with the call
        elif wanted is None and any(not isinstance(part, Text) for part in parts):
            wanted = self.pictures
        return request.template if wanted is None else {**request.template, VARIABLE: wanted}


PLAIN: Final = ThinkingDefault()


class ReasoningSplitter:
    """Splits one choice's text into reasoning and answer, without white space between them."""

    def __init__(self, opened: bool, *, call: str | None = None) -> None:
        """`call`: text that begins a call of a tool, which also ends the reasoning."""
        self._ends = (CLOSE,) if call is None else (CLOSE, call)
        self._state = "thinking" if opened else "undecided"
        self._begun = False  # something of the present part was there that is not white space
        self._buffer = ""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._state == "thinking"

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and text that are certain now."""
        self._buffer += text
        if self._state == "undecided":
            self._decide()
        reasoning = self._reasoning() if self._state == "thinking" else ""
        return reasoning, self._answer() if self._state in ("answering", "plain") else ""

    def flush(self) -> tuple[str, str]:
        """The text or events that were held back, at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if self._state == "thinking":
            return (rest if self._begun else rest.lstrip()).rstrip(), ""
        return "", rest

    def _decide(self) -> None:
        start = self._buffer.lstrip()
        if start.startswith(OPEN):
            self._state, self._buffer = "thinking", start.removeprefix(OPEN)
        elif not OPEN.startswith(start):
            self._state = "plain"

    def _reasoning(self) -> str:
        found = [(self._buffer.find(end), end) for end in self._ends if end in self._buffer]
        if found:
            cut, end = min(found)
            rest = self._buffer[cut + len(end) :] if end == CLOSE else self._buffer[cut:]
            whole = self._buffer[:cut].rstrip()
            thought = whole if self._begun else whole.lstrip()
            self._state, self._begun, self._buffer = "answering", False, rest
            return thought
        # Held back: what may be the beginning of an end, and the white space before it.
        held = max(n for end in self._ends for n in range(len(end)) if self._buffer.endswith(end[:n]))
        sure = self._buffer[: len(self._buffer) - held].rstrip()
        self._buffer = self._buffer[len(sure) :]
        sure = sure if self._begun else sure.lstrip()
        self._begun = self._begun or bool(sure)
        return sure

    def _answer(self) -> str:
        text, self._buffer = self._buffer, ""
        if self._state == "answering" and not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text
