"""The official openai SDK on `snugvl serve`: python examples/chat_with_openai_sdk.py [--server URL] [--tools]

The same code works with any server that speaks OpenAI's protocol.
"""

import argparse
import base64
import json
from pathlib import Path
from typing import Any

import openai

PICTURE = Path(__file__).parent / "images" / "shapes.png"
COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}


def question(text: str) -> list[Any]:
    """A message with the picture."""
    url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


def main(server: str, *, tools: bool) -> None:
    """A streamed answer about a picture, one in the form of a JSON schema, and perhaps a tool call."""
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    model = client.models.list().data[0].id

    messages = question("What color is the circle?")
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    form: Any = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLOR, "strict": True}}
    answer = client.chat.completions.create(model=model, messages=messages, response_format=form)
    print(json.loads(answer.choices[0].message.content or ""))

    if tools:
        call_a_tool(client, model)


def call_a_tool(client: openai.OpenAI, model: str) -> None:
    """For a model that was trained to call tools; pocket was not, and would paint in any color."""
    offered: Any = [{"type": "function", "function": {"name": "paint", "parameters": COLOR}}]
    messages = question("What color are the squares?")
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=offered, tool_choice="required"
    )
    for call in answer.choices[0].message.tool_calls or []:
        if call.type == "function":
            print(call.function.name, json.loads(call.function.arguments))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="a running `snugvl serve`")
    parser.add_argument("--tools", action="store_true", help="a tool call, too, of a model that knows them")
    options = parser.parse_args()
    main(options.server, tools=options.tools)
