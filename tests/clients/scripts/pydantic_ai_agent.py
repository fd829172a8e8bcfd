"""pydantic-ai: an agent with a tool, a picture and typed answers, over two protocols.

Packages: pydantic-ai-slim
Ran: over OpenAI's chat and Responses an agent of two turns with its history, a picture and a tool;
NativeOutput and ToolOutput; NativeOutput together with a tool
"""

from typing import Literal

import about
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Shape(BaseModel):
    color: Literal["red", "green", "blue"]
    count: Literal[0, 1, 2, 3]


def models(server: str) -> list:
    # Not AnthropicModel: with the anthropic SDK of today it ends before it asks, by a mistake of its own.
    openai = OpenAIProvider(base_url=f"{server}/v1", api_key="none")
    return [
        OpenAIChatModel("pocket", provider=openai),
        OpenAIResponsesModel("pocket", provider=openai),
    ]


def count_shapes(shape: Literal["circle", "square", "triangle"]) -> str:
    """Counts the shapes of one kind."""
    return about.TOOL_ANSWER


picture = BinaryContent(about.Path(about.PICTURE).read_bytes(), media_type="image/png")
firsts, turns = [], []
for pocket, willing in zip(models(about.SERVER), models(about.WILLING), strict=True):
    firsts.append(Agent(pocket).run_sync([about.FIRST, picture]).output)
    agent = Agent(willing, tools=[count_shapes], instructions="Count.")
    history: list = []
    for question in ([about.TOOL_QUESTION, picture], about.SECOND):
        result = agent.run_sync(question, message_history=history)
        history = result.all_messages()
        parts = [part for message in result.new_messages() for part in message.parts]
        (call,) = [part for part in parts if isinstance(part, ToolCallPart)]
        turns.append({"call": about.as_call(call.tool_name, call.args_as_dict()), "after": result.output})

pocket = models(about.SERVER)[0]
native = Agent(pocket, output_type=NativeOutput(Shape)).run_sync([about.STRUCTURE, picture]).output
called = Agent(pocket, output_type=ToolOutput(Shape)).run_sync([about.STRUCTURE, picture]).output
both = Agent(pocket, output_type=NativeOutput(Shape), tools=[count_shapes])
assert isinstance(both.run_sync([about.STRUCTURE, picture]).output, Shape)
assert isinstance(called, Shape)
about.report_loop(first=firsts[0], turns=turns, structured=native.model_dump())
