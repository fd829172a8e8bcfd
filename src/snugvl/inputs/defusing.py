"""Control tokens that content happens to spell: broken up, so that the model reads them as text.

A file that an agent reads, a page that a tool returns and an old answer may hold `<|im_end|>`, and who sends
them can't change what they say. Whoever could write a control token could end a turn and speak as the system,
so each gets a word joiner, which is invisible, after its first character:

    <|im_end|>  ─►  <U+2060|im_end|>  ─►  tokens of "<" and of "|im_end|>"

Our own engine tokenises what stands before and behind the joiner apart, so the model sees exactly the text
that was sent (`Tokenizer.encode`); others are given the joiner.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from snugvl.core.messages import Message, Part, Text, Tool, ToolCall
from snugvl.inputs.chat import texts
from snugvl.inputs.tools.in_text import call_arguments

JOINER: Final = "\u2060"
Break = Callable[[str], str]
_ROUNDS: Final = 8  # what is broken up may hold another one, each shorter


def pattern_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of `marks`, the longest first, without those of one character, which can't be broken up."""
    found = sorted({mark for mark in marks if len(mark) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found)) or "(?!)")


def joints_of(contents: Iterable[str]) -> re.Pattern[str]:
    """The joiners that `broken_up` puts into these strings."""
    parted = [(re.escape(each[0]), re.escape(each[1:])) for each in contents if len(each) > 1]
    places = "|".join(f"(?<={first}{JOINER})(?={rest})" for first, rest in parted)
    return re.compile(f"{JOINER}(?:{places})" if parted else "(?!)")


def broken_up(text: str, marks: re.Pattern[str]) -> str:
    """The text, with a joiner within each mark."""
    for _ in range(_ROUNDS):
        text, found = marks.subn(lambda found: f"{found[0][0]}{JOINER}{found[0][1:]}", text)
        if not found:
            break
    return text


def defused(
    messages: Sequence[Message], tools: Sequence[Tool], break_up: Break
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """A conversation and its tools, with every text of theirs broken up where it spells a control token.
    `break_up`: what makes of a text one without control tokens.

    Raises:
        RequestError: the arguments of a call are not a JSON object.
    """
    if all(break_up(text) == text for _, text in texts(messages, tools)):
        return tuple(messages), tuple(tools)
    return (
        tuple(_message(message, index, break_up) for index, message in enumerate(messages)),
        tuple(
            replace(
                tool,
                description=break_up(tool.description),
                parameters=_values(dict(tool.parameters), break_up),
            )
            for tool in tools
        ),
    )


def _message(message: Message, index: int, break_up: Break) -> Message:
    calls = []
    for number, call in enumerate(message.tool_calls):
        arguments = call_arguments(call, f"messages[{index}].tool_calls[{number}].arguments")
        text = json.dumps(_values(arguments, break_up), ensure_ascii=False)
        calls.append(ToolCall(break_up(call.id), break_up(call.name), text))
    answers = message.tool_call_id and break_up(message.tool_call_id)
    return replace(
        message,
        content=tuple(_parts(message.content, break_up)),
        tool_calls=tuple(calls),
        tool_call_id=answers,
        reasoning=break_up(message.reasoning),
    )


def _parts(content: Iterable[Part], break_up: Break) -> list[Part]:
    """The parts, their texts broken up; also those that a template may join, with pictures left out."""
    parts = list(_joined(content, break_up))
    words = [part.unmarked for part in parts if isinstance(part, Text)]
    joined = ("".join(words), "".join(text.strip() for text in words))
    if all(break_up(text) == text for text in joined):
        return parts
    return [replace(part, text=part.text + JOINER) if isinstance(part, Text) else part for part in parts]


def _joined(content: Iterable[Part], break_up: Break) -> Iterator[Part]:
    """The parts; texts without marks beside each other are one, as templates join them."""
    for words, group in groupby(content, key=lambda part: isinstance(part, Text) and not part.marks):
        parts = list(group)
        if words:
            yield Text(break_up("".join(part.text for part in parts if isinstance(part, Text))))
            continue
        for part in parts:
            yield _marked(part, break_up) if isinstance(part, Text) else part


def _marked(part: Text, break_up: Break) -> Text:
    """A text of ours with the marks that it holds on purpose."""
    pieces = re.split(f"({pattern_of(part.marks).pattern})", part.text)
    kept = [piece if piece in part.marks else break_up(piece) for piece in pieces if piece]
    return Text("".join(kept), part.marks)


def _values(value: Any, break_up: Break) -> Any:
    """JSON with every string in it broken up; a request's is nested so little that recursion will do."""
    if isinstance(value, str):
        return break_up(value)
    if isinstance(value, Mapping):
        return {break_up(name): _values(each, break_up) for name, each in value.items()}
    return [_values(each, break_up) for each in value] if isinstance(value, list) else value
