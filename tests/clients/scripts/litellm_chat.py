"""litellm.

Packages: litellm
Ran: a streamed conversation about a picture, a typed answer, a forced call and its answer
"""

import json
import os

# Or it reads a list of prices on the net when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import about
import litellm


def ask(messages: list, **options: object) -> object:
    return litellm.completion(
        model="openai/pocket",
        api_base=f"{about.SERVER}/v1",
        api_key="none",
        messages=messages,
        num_retries=0,
        **options,
    )


history: list = [{"role": "user", "content": about.openai_content(about.FIRST)}]
pieces = [chunk.choices[0].delta.content or "" for chunk in ask(history, stream=True)]
history += [{"role": "assistant", "content": "".join(pieces)}, {"role": "user", "content": about.SECOND}]
second = "".join(chunk.choices[0].delta.content or "" for chunk in ask(history, stream=True))

form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": about.SCHEMA, "strict": True}}
answer = ask([{"role": "user", "content": about.openai_content(about.STRUCTURE)}], response_format=form)

asked: list = [{"role": "user", "content": about.openai_content(about.TOOL_QUESTION)}]
message = ask(asked, tools=[about.OPENAI_TOOL], tool_choice="required").choices[0].message
call = message.tool_calls[0]
asked.append(message.model_dump(include={"role", "content", "tool_calls"}))
asked += [
    {"role": "tool", "tool_call_id": each.id, "content": about.TOOL_ANSWER} for each in message.tool_calls
]
after = ask(asked, tools=[about.OPENAI_TOOL], max_tokens=20)

about.report(
    pieces=pieces,
    second=second,
    structured=json.loads(answer.choices[0].message.content),
    call={"name": call.function.name, "arguments": json.loads(call.function.arguments)},
    after=after.choices[0].message.content,
)
