"""haystack: OpenAIChatGenerator and its tools.

Packages: haystack-ai
Ran: a picture, streamed; a typed answer; two turns with a tool, every message kept; a forced call
"""

from typing import Literal

import about
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import create_tool_from_function
from haystack.utils import Secret


def count_shapes(shape: Literal["circle", "square", "triangle"]) -> str:
    """Counts the shapes of one kind."""
    return about.TOOL_ANSWER


def generator(server: str) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        model="pocket", api_base_url=f"{server}/v1", api_key=Secret.from_token("none"), max_retries=0
    )


def shown(text: str) -> ChatMessage:
    return ChatMessage.from_user(content_parts=[ImageContent.from_file_path(about.PICTURE), text])


tool = create_tool_from_function(count_shapes)
pocket, willing = generator(about.SERVER), generator(about.WILLING)
pieces: list = []
described = pocket.run([shown(about.FIRST)], streaming_callback=pieces.append)["replies"][0]
assert len(pieces) > 2
form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": about.SCHEMA, "strict": True}}
structured = pocket.run([shown(about.STRUCTURE)], generation_kwargs={"response_format": form})["replies"][0]
must = {"tool_choice": "required"}
forced = pocket.run([shown(about.TOOL_QUESTION)], tools=[tool], generation_kwargs=must)["replies"][0]

turns = []
history: list = []
for message in (shown(about.TOOL_QUESTION), ChatMessage.from_user(about.SECOND)):
    history.append(message)
    (answer,) = willing.run(history, tools=[tool])["replies"]
    call = answer.tool_calls[0]
    history += [answer, ChatMessage.from_tool(tool.invoke(**call.arguments), origin=call)]
    (after,) = willing.run(history, tools=[tool])["replies"]
    history.append(after)
    turns.append({"call": about.as_call(call.tool_name, call.arguments), "after": after.text})

about.report_loop(
    first=described.text,
    turns=turns,
    structured=about.json.loads(structured.text),
    forced=about.as_call(forced.tool_calls[0].tool_name, forced.tool_calls[0].arguments),
)
