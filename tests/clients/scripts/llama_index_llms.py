"""llama-index: OpenAILike and Ollama, each with its own tool calls.

Packages: llama-index-llms-openai-like llama-index-llms-ollama
Ran: with each, a picture, a typed answer, and two turns with a tool, every message kept; a forced
call with OpenAI's
"""

from typing import Literal

import about
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Shape(BaseModel):
    """A shape and how many there are."""

    color: Literal["red", "green", "blue"]
    count: Literal[0, 1, 2, 3]


def count_shapes(shape: Literal["circle", "square", "triangle"]) -> str:
    """Counts the shapes of one kind."""
    return about.TOOL_ANSWER


def models(server: str) -> list:
    options = {"max_tokens": 200, "is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return [
        OpenAILike(model="pocket", api_base=f"{server}/v1", api_key="none", **options),
        Ollama(model="pocket", base_url=server, request_timeout=600, additional_kwargs={"num_predict": 200}),
    ]


def shown(text: str) -> ChatMessage:
    return ChatMessage(role="user", blocks=[ImageBlock(path=about.PICTURE), TextBlock(text=text)])


tool = FunctionTool.from_defaults(count_shapes)
firsts, turns, typed = [], [], []
for pocket, willing in zip(models(about.SERVER), models(about.WILLING), strict=True):
    firsts.append(pocket.chat([shown(about.FIRST)]).message.content)
    typed.append(pocket.as_structured_llm(Shape).chat([shown(about.STRUCTURE)]).raw)
    history: list = []
    for message in (shown(about.TOOL_QUESTION), ChatMessage(role="user", content=about.SECOND)):
        history.append(message)
        answer = willing.chat_with_tools([tool], chat_history=history)
        (call,) = willing.get_tool_calls_from_response(answer)
        kwargs = {"tool_call_id": call.tool_id, "name": call.tool_name}
        history += [
            answer.message,
            ChatMessage(role="tool", content=about.TOOL_ANSWER, additional_kwargs=kwargs),
        ]
        after = willing.chat_with_tools([tool], chat_history=history)
        history.append(after.message)
        turns.append(
            {"call": about.as_call(call.tool_name, call.tool_kwargs), "after": after.message.content}
        )

pocket = models(about.SERVER)[0]
response = pocket.chat_with_tools([tool], chat_history=[shown(about.TOOL_QUESTION)], tool_required=True)
forced = pocket.get_tool_calls_from_response(response)[0]
assert all(isinstance(each, Shape) for each in typed), typed
about.report_loop(
    first=firsts[0],
    turns=turns,
    structured=typed[0].model_dump(),
    forced=about.as_call(forced.tool_name, forced.tool_kwargs),
)
