"""The `ollama` Python client. Its protocol can't demand a tool call: that is asked of the willing server.

Packages: ollama
Ran: `list` and `show`; a streamed conversation about a picture; `generate`; a typed answer; a tool
"""

import json

import about
from ollama import Client

client = Client(about.SERVER)
names = [model.model for model in client.list().models]
assert names, "no model is listed"
assert client.show("pocket").capabilities, "no capabilities are shown"

history: list = [{"role": "user", "content": about.FIRST, "images": [about.PICTURE]}]
chunks = list(client.chat("pocket", messages=history, stream=True))
assert chunks[-1].done
assert chunks[-1].eval_count
pieces = [chunk.message.content or "" for chunk in chunks]
history += [{"role": "assistant", "content": "".join(pieces)}, {"role": "user", "content": about.SECOND}]
second = "".join(
    chunk.message.content or "" for chunk in client.chat("pocket", messages=history, stream=True)
)

asked: list = [{"role": "user", "content": about.STRUCTURE, "images": [about.PICTURE]}]
structured = client.chat("pocket", messages=asked, format=about.SCHEMA)
generated = client.generate("pocket", about.FIRST, images=[about.PICTURE])
assert generated.response == "".join(pieces)

willing = Client(about.WILLING)
asked = [{"role": "user", "content": about.TOOL_QUESTION, "images": [about.PICTURE]}]
called = list(willing.chat("pocket", messages=asked, tools=[about.OPENAI_TOOL], stream=True))
(call,) = [call for chunk in called for call in chunk.message.tool_calls or ()]
asked += [
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_name": about.TOOL_NAME, "content": about.TOOL_ANSWER},
]
after = willing.chat("pocket", messages=asked, tools=[about.OPENAI_TOOL])

about.report(
    pieces=pieces,
    second=second,
    structured=json.loads(structured.message.content or ""),
    call={"name": call.function.name, "arguments": dict(call.function.arguments)},
    after=after.message.content or "",
)
