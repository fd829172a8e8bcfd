"""openai-agents: an agent with a tool and a picture, over chat completions and over Responses.

Packages: openai-agents
Ran: over each of two protocols two turns with the history that the SDK keeps, a picture and a tool, the
second turn streamed; a typed answer; a typed answer where a tool is offered, too
"""

import asyncio
from typing import Literal

import about
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.items import ToolCallItem
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Shape(BaseModel):
    color: Literal["red", "green", "blue"]
    count: Literal[0, 1, 2, 3]


@function_tool
def count_shapes(shape: Literal["circle", "square", "triangle"]) -> str:
    """Counts the shapes of one kind."""
    return about.TOOL_ANSWER


def shown(text: str) -> list:
    parts = [
        {"type": "input_image", "image_url": about.DATA_URL, "detail": "auto"},
        {"type": "input_text", "text": text},
    ]
    return [{"role": "user", "content": parts}]


async def main() -> None:
    turns, firsts, typed = [], [], []
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        pocket, willing = (
            kind("pocket", AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0))
            for server in (about.SERVER, about.WILLING)
        )
        firsts.append((await Runner.run(Agent("a", model=pocket), shown(about.FIRST))).final_output)
        agent = Agent("counter", instructions="Count.", model=willing, tools=[count_shapes])
        result = await Runner.run(agent, shown(about.TOOL_QUESTION))
        history = [*result.to_input_list(), {"role": "user", "content": about.SECOND}]
        streamed = Runner.run_streamed(agent, history)
        async for _ in streamed.stream_events():
            pass
        for each in (result, streamed):
            (call,) = [item.raw_item for item in each.new_items if isinstance(item, ToolCallItem)]
            turns.append({"call": about.as_call(call.name, call.arguments), "after": each.final_output})
        for tools in ([], [count_shapes]):
            # Pocket never learned when to stop calling: left to itself it would call in every turn.
            chosen = ModelSettings(tool_choice="none" if tools else None)
            agent = Agent("typed", model=pocket, output_type=Shape, tools=tools, model_settings=chosen)
            typed.append((await Runner.run(agent, shown(about.STRUCTURE))).final_output)
    assert all(isinstance(each, Shape) for each in typed), typed
    about.report_loop(first=firsts[0], turns=turns, structured=typed[0].model_dump())


asyncio.run(main())
