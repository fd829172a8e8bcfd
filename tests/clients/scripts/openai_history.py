"""openai-python: what `parse`, `stream` and Responses give goes back into the history as it is.

Packages: openai
Ran: `parse` with a picture and a typed answer; `stream` with a tool, twice, each message appended as it came;
`responses.create` with a tool, every output item sent back
"""

from typing import Literal

import about
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

pocket = OpenAI(base_url=f"{about.SERVER}/v1", api_key="none", max_retries=0)
willing = OpenAI(base_url=f"{about.WILLING}/v1", api_key="none", max_retries=0)


class Shape(BaseModel):
    color: Literal["red", "green", "blue"]
    count: Literal[0, 1, 2, 3]


class CountShapes(BaseModel):
    """Counts the shapes of one kind."""

    shape: Literal["circle", "square", "triangle"]


history: list = [{"role": "user", "content": about.openai_content(about.FIRST)}]
with pocket.chat.completions.stream(model="pocket", messages=history) as events:
    described = events.get_final_completion().choices[0].message
history += [described, {"role": "user", "content": about.STRUCTURE}]
parsed = pocket.chat.completions.parse(model="pocket", messages=history, response_format=Shape)
history += [parsed.choices[0].message, {"role": "user", "content": about.SECOND}]
assert pocket.chat.completions.parse(model="pocket", messages=history, response_format=Shape).choices

tool = pydantic_function_tool(CountShapes, name=about.TOOL_NAME)
asked: list = [{"role": "user", "content": about.openai_content(about.TOOL_QUESTION)}]
forced = pocket.chat.completions.parse(model="pocket", messages=asked, tools=[tool], tool_choice="required")
called = forced.choices[0].message
answers = [{"role": "tool", "tool_call_id": c.id, "content": about.TOOL_ANSWER} for c in called.tool_calls]
asked += [called, *answers]
assert pocket.chat.completions.create(model="pocket", messages=asked, tools=[tool], max_tokens=20).choices

turns = []
asked = []
for question in (about.openai_content(about.TOOL_QUESTION), about.SECOND):
    asked.append({"role": "user", "content": question})
    with willing.chat.completions.stream(model="pocket", messages=asked, tools=[about.OPENAI_TOOL]) as events:
        message = events.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    asked += [message, {"role": "tool", "tool_call_id": call.id, "content": about.TOOL_ANSWER}]
    with willing.chat.completions.stream(model="pocket", messages=asked, tools=[about.OPENAI_TOOL]) as events:
        after = events.get_final_completion().choices[0].message
    asked.append(after)
    made = about.as_call(call.function.name, call.function.arguments)
    turns.append({"call": made, "after": after.content})

flat = {"type": "function", "strict": False, **about.OPENAI_TOOL["function"]}
shown = [
    {"type": "input_image", "image_url": about.DATA_URL, "detail": "auto"},
    {"type": "input_text", "text": about.TOOL_QUESTION},
]
items: list = []
for question in (shown, about.SECOND):
    items.append({"role": "user", "content": question})
    response = willing.responses.create(model="pocket", input=items, tools=[flat])
    (call,) = [item for item in response.output if item.type == "function_call"]
    items += response.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": about.TOOL_ANSWER})
    response = willing.responses.create(model="pocket", input=items, tools=[flat])
    items += response.output
    turns.append({"call": about.as_call(call.name, call.arguments), "after": response.output_text})
typed = pocket.responses.parse(model="pocket", input=[{"role": "user", "content": shown}], text_format=Shape)
assert isinstance(typed.output_parsed, Shape)

about.report_loop(
    first=described.content,
    turns=turns,
    structured=parsed.choices[0].message.parsed.model_dump(),
    forced=about.as_call(called.tool_calls[0].function.name, called.tool_calls[0].function.arguments),
)
