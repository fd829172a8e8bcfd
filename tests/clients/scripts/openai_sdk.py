"""The official openai SDK: chat completions, and the same over responses.

Packages: openai
Ran: a streamed conversation about a picture, a typed answer, `parse`, a forced call and its answer; Responses
"""

import json
from typing import Literal

import about
from openai import OpenAI
from pydantic import BaseModel

PARSED = {"index": True, "function": {"parsed_arguments"}}  # of the SDK's helper, not of the protocol
client = OpenAI(base_url=f"{about.SERVER}/v1", api_key="none", max_retries=0)


class Shape(BaseModel):
    color: Literal["red", "green", "blue"]
    count: Literal[0, 1, 2, 3]


history: list = [{"role": "user", "content": about.openai_content(about.FIRST)}]
stream = client.chat.completions.create(
    model="pocket", messages=history, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
assert chunks[-1].usage is not None
assert chunks[-1].usage.completion_tokens > 0

history += [{"role": "assistant", "content": "".join(pieces)}, {"role": "user", "content": about.SECOND}]
with client.chat.completions.stream(model="pocket", messages=history) as events:
    second = events.get_final_completion().choices[0].message.content

form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": about.SCHEMA, "strict": True}}
asked = [{"role": "user", "content": about.openai_content(about.STRUCTURE)}]
answer = client.chat.completions.create(model="pocket", messages=asked, response_format=form)
parsed = client.chat.completions.parse(model="pocket", messages=asked, response_format=Shape)
assert isinstance(parsed.choices[0].message.parsed, Shape)

asked = [{"role": "user", "content": about.openai_content(about.TOOL_QUESTION)}]
with client.chat.completions.stream(
    model="pocket",
    messages=asked,
    tools=[about.OPENAI_TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
) as events:
    message = events.get_final_completion().choices[0].message
call = message.tool_calls[0]
asked += [
    {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude=PARSED)]},
    {"role": "tool", "tool_call_id": call.id, "content": about.TOOL_ANSWER},
]
after = client.chat.completions.create(
    model="pocket", messages=asked, tools=[about.OPENAI_TOOL], max_tokens=20
)

shown = [{"type": "input_image", "image_url": about.DATA_URL}, {"type": "input_text", "text": about.FIRST}]
with client.responses.stream(model="pocket", input=[{"role": "user", "content": shown}]) as events:
    assert events.get_final_response().output_text == "".join(pieces)

about.report(
    pieces=pieces,
    second=second,
    structured=json.loads(answer.choices[0].message.content),
    call={"name": call.function.name, "arguments": json.loads(call.function.arguments)},
    after=after.choices[0].message.content,
)
