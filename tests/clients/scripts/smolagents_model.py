"""smolagents: OpenAIServerModel with pictures and tools, as its ToolCallingAgent asks it.

Packages: smolagents
Ran: a picture; a typed answer; a tool, forced as the agent forces it; two turns with its
messages
"""

from typing import Literal

import about
from PIL import Image
from smolagents import ChatMessage, OpenAIServerModel, tool


@tool
def count_shapes(shape: Literal["circle", "square", "triangle"]) -> str:
    """Counts the shapes of one kind.

    Args:
        shape: circle, square or triangle.
    """
    return about.TOOL_ANSWER


def model(server: str) -> OpenAIServerModel:
    return OpenAIServerModel(
        "pocket", api_base=f"{server}/v1", api_key="none", flatten_messages_as_text=False
    )


def shown(text: str) -> ChatMessage:
    content = [{"type": "image", "image": Image.open(about.PICTURE)}, {"type": "text", "text": text}]
    return ChatMessage(role="user", content=content)


pocket, willing = model(about.SERVER), model(about.WILLING)
described = pocket.generate([shown(about.FIRST)])
form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": about.SCHEMA}}
structured = pocket.generate([shown(about.STRUCTURE)], response_format=form)
(forced,) = pocket.generate([shown(about.TOOL_QUESTION)], tools_to_call_from=[count_shapes]).tool_calls[:1]

turns = []
history: list = []
for message in (
    shown(about.TOOL_QUESTION),
    ChatMessage(role="user", content=[{"type": "text", "text": "?"}]),
):
    history.append(message)
    answer = willing.generate(history, tools_to_call_from=[count_shapes], tool_choice="auto")
    (call,) = answer.tool_calls
    said = [{"type": "text", "text": f"Calling tools: {call.function.name}"}]
    result = [{"type": "text", "text": f"Observation: {about.TOOL_ANSWER}"}]
    history += [
        ChatMessage(role="tool-call", content=said),
        ChatMessage(role="tool-response", content=result),
    ]
    after = willing.generate(history, tools_to_call_from=[count_shapes], tool_choice="auto")
    history.append(ChatMessage(role="assistant", content=[{"type": "text", "text": after.content}]))
    turns.append({"call": about.as_call(call.function.name, call.function.arguments), "after": after.content})

about.report_loop(
    first=described.content,
    turns=turns,
    structured=about.json.loads(structured.content),
    forced=about.as_call(forced.function.name, forced.function.arguments),
)
