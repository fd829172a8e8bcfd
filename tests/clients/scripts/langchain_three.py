"""LangChain: ChatOpenAI, ChatOllama and ChatAnthropic, one loop for all.

Packages: langchain-openai langchain-ollama langchain-anthropic
Ran: with each, a streamed picture, a typed answer, and a tool, twice, every message kept; a forced call with
OpenAI's and Anthropic's (Ollama's protocol has none)
"""

from typing import Literal

import about
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Shape(BaseModel):
    """A shape and how many there are."""

    color: Literal["red", "green", "blue"]
    count: Literal[0, 1, 2, 3]


@tool
def count_shapes(shape: Literal["circle", "square", "triangle"]) -> str:
    """Counts the shapes of one kind."""
    return about.TOOL_ANSWER


def models(server: str) -> list:
    return [
        ChatOpenAI(model="pocket", base_url=f"{server}/v1", api_key="none", max_retries=0),
        ChatAnthropic(model="pocket", base_url=server, api_key="none", max_retries=0, max_tokens=200),
        ChatOllama(model="pocket", base_url=server, validate_model_on_init=True),
    ]


turns, firsts, typed, forced = [], [], [], []
for pocket, willing in zip(models(about.SERVER), models(about.WILLING), strict=True):
    chunks = list(pocket.stream([HumanMessage(about.openai_content(about.FIRST))]))
    firsts.append("".join(chunk.text for chunk in chunks))
    asked = [HumanMessage(about.openai_content(about.STRUCTURE))]
    typed.append(pocket.with_structured_output(Shape, method="json_schema").invoke(asked))
    if not isinstance(pocket, ChatOllama):
        (called,) = pocket.bind_tools([count_shapes], tool_choice="any").invoke(asked).tool_calls[:1]
        forced.append(about.as_call(called["name"], called["args"]))
    history: list = []
    for question in (about.openai_content(about.TOOL_QUESTION), about.SECOND):
        history.append(HumanMessage(question))
        answer = willing.bind_tools([count_shapes]).invoke(history)
        (call,) = answer.tool_calls
        history += [answer, ToolMessage(count_shapes.invoke(call["args"]), tool_call_id=call["id"])]
        after = willing.bind_tools([count_shapes]).invoke(history)
        history.append(after)
        turns.append({"call": about.as_call(call["name"], call["args"]), "after": after.text})

assert len({first.strip() for first in firsts}) == 1, firsts
assert all(isinstance(each, Shape) for each in typed)
assert forced[0]["name"] == forced[1]["name"]
about.report_loop(first=firsts[0], turns=turns, structured=typed[0].model_dump(), forced=forced[0])
