"""ollama and anthropic for Python: their own message objects go back into the history.

Packages: ollama anthropic
Ran: with each a picture, a typed answer and two turns with a tool; Anthropic's with thinking, a cache mark
and a picture in the tool's answer, and a forced call
"""

import about
from anthropic import Anthropic
from ollama import Client

turns = []
pocket, willing = Client(about.SERVER), Client(about.WILLING)
shown = {"role": "user", "content": about.FIRST, "images": [about.PICTURE]}
first = pocket.chat("pocket", [shown]).message
typed = pocket.chat("pocket", [{**shown, "content": about.STRUCTURE}], format=about.SCHEMA).message
history: list = []
for message in ({**shown, "content": about.TOOL_QUESTION}, {"role": "user", "content": about.SECOND}):
    history.append(message)
    answer = willing.chat("pocket", history, tools=[about.OPENAI_TOOL], keep_alive="5m").message
    call = answer.tool_calls[0].function
    history += [answer, {"role": "tool", "tool_name": call.name, "content": about.TOOL_ANSWER}]
    after = willing.chat("pocket", history, tools=[about.OPENAI_TOOL]).message
    history.append(after)
    turns.append({"call": about.as_call(call.name, call.arguments), "after": after.content})

image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": about.DATA}}
tool = {"name": about.TOOL_NAME, "description": "Counts.", "input_schema": about.TOOL_PARAMETERS}
anthropic = Anthropic(base_url=about.WILLING, api_key="none", max_retries=0)
thinking = {"type": "enabled", "budget_tokens": 1024}
marked = {"type": "text", "text": about.TOOL_QUESTION, "cache_control": {"type": "ephemeral"}}
history = []
for content in ([image, marked], about.SECOND):
    history.append({"role": "user", "content": content})
    options = {"model": "pocket", "max_tokens": 2048, "tools": [tool], "thinking": thinking}
    with anthropic.messages.stream(messages=history, **options) as stream:
        answer = stream.get_final_message()
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    said = [{"type": "text", "text": about.TOOL_ANSWER}, image]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": said, "is_error": False}
    history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = anthropic.messages.create(messages=history, **options)
    history.append({"role": "assistant", "content": after.content})
    text = "".join(block.text for block in after.content if block.type == "text")
    turns.append({"call": about.as_call(call.name, call.input), "after": text})

asked = [{"role": "user", "content": [image, {"type": "text", "text": about.TOOL_QUESTION}]}]
options = {"tools": [tool], "tool_choice": {"type": "tool", "name": about.TOOL_NAME}}
client = Anthropic(base_url=about.SERVER, api_key="none", max_retries=0)
forced = client.messages.create(model="pocket", max_tokens=200, messages=asked, **options).content[-1]
about.report_loop(
    first=first.content,
    turns=turns,
    structured=about.json.loads(typed.content),
    forced=about.as_call(forced.name, forced.input),
)
