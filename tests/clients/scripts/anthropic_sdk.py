"""The official anthropic SDK.

Packages: anthropic
Ran: a streamed conversation about a picture, counted tokens, a typed answer, a forced call and its answer
"""

import json

import about
from anthropic import Anthropic

client = Anthropic(base_url=about.SERVER, api_key="none", max_retries=0)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": about.DATA}}
TOOL = {
    "name": about.TOOL_NAME,
    "description": about.TOOL_DESCRIPTION,
    "input_schema": about.TOOL_PARAMETERS,
}


def shown(text: str) -> list:
    return [{"role": "user", "content": [IMAGE, {"type": "text", "text": text}]}]


history = shown(about.FIRST)
with client.messages.stream(model="pocket", max_tokens=100, messages=history) as stream:
    pieces = list(stream.text_stream)
    first = stream.get_final_message()
assert first.stop_reason == "end_turn"
assert first.usage.output_tokens > 0
counted = client.messages.count_tokens(model="pocket", messages=history)
assert counted.input_tokens == first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": about.SECOND}]
with client.messages.stream(model="pocket", max_tokens=100, messages=history) as stream:
    second = stream.get_final_text()

structured = client.messages.create(
    model="pocket",
    max_tokens=100,
    messages=shown(about.STRUCTURE),
    output_config={"format": {"type": "json_schema", "schema": about.SCHEMA}},
)

asked = shown(about.TOOL_QUESTION)
choice = {"type": "any", "disable_parallel_tool_use": True}
with client.messages.stream(
    model="pocket", max_tokens=200, messages=asked, tools=[TOOL], tool_choice=choice
) as stream:
    called = stream.get_final_message()
assert called.stop_reason == "tool_use"
(call,) = [block for block in called.content if block.type == "tool_use"]
answer = {"type": "tool_result", "tool_use_id": call.id, "content": about.TOOL_ANSWER}
asked += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [answer]}]
after = client.messages.create(model="pocket", max_tokens=20, messages=asked, tools=[TOOL])

about.report(
    pieces=pieces,
    second=second,
    structured=json.loads(structured.content[0].text),
    call={"name": call.name, "arguments": call.input},
    after="".join(block.text for block in after.content if block.type == "text"),
)
