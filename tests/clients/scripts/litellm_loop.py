"""litellm: its own loop, which appends the message object that it got.

Packages: litellm
Ran: a picture; a typed answer; a tool, twice, the message appended as it came; a forced call
"""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import about
import litellm


def ask(server: str, messages: list, **options: object) -> object:
    return (
        litellm.completion(
            model="openai/pocket",
            api_base=f"{server}/v1",
            api_key="none",
            messages=messages,
            num_retries=0,
            **options,
        )
        .choices[0]
        .message
    )


history: list = [{"role": "user", "content": about.openai_content(about.FIRST)}]
described = ask(about.SERVER, history)
history += [described, {"role": "user", "content": about.STRUCTURE}]
form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": about.SCHEMA, "strict": True}}
structured = ask(about.SERVER, history, response_format=form)
asked = [{"role": "user", "content": about.openai_content(about.TOOL_QUESTION)}]
forced = ask(about.SERVER, asked, tools=[about.OPENAI_TOOL], tool_choice="required").tool_calls[0].function

turns = []
asked = []
for question in (about.openai_content(about.TOOL_QUESTION), about.SECOND):
    asked.append({"role": "user", "content": question})
    message = ask(about.WILLING, asked, tools=[about.OPENAI_TOOL], tool_choice="auto")
    (call,) = message.tool_calls
    asked += [
        message,
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": about.TOOL_ANSWER},
    ]
    after = ask(about.WILLING, asked, tools=[about.OPENAI_TOOL])
    asked.append(after)
    turns.append({"call": about.as_call(call.function.name, call.function.arguments), "after": after.content})

about.report_loop(
    first=described.content,
    turns=turns,
    structured=json.loads(structured.content),
    forced=about.as_call(forced.name, forced.arguments),
)
