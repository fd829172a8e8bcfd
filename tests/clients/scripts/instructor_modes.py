"""instructor: every mode that it has for OpenAI's protocol, and for Anthropic's.

Packages: instructor openai anthropic
Ran: a typed answer about a picture in the modes TOOLS, TOOLS_STRICT, PARALLEL_TOOLS, JSON, JSON_SCHEMA,
MD_JSON, RESPONSES_TOOLS, ANTHROPIC_TOOLS and ANTHROPIC_JSON; a partial answer, streamed
"""

from collections.abc import Iterable
from typing import Literal

import about
import instructor
from anthropic import Anthropic
from instructor import Mode
from instructor.core import InstructorError
from openai import APIError, OpenAI
from pydantic import BaseModel


class CountShapes(BaseModel):
    """Counts the shapes of one kind."""

    color: Literal["red", "green", "blue"]
    count: Literal[0, 1, 2, 3]


class count_shapes(BaseModel):  # noqa: N801, the tool that the willing server calls
    """Counts the shapes of one kind."""

    shape: str


openai = OpenAI(base_url=f"{about.SERVER}/v1", api_key="none", max_retries=0)
anthropic = Anthropic(base_url=about.SERVER, api_key="none", max_retries=0)
asked = [{"role": "user", "content": about.openai_content(about.STRUCTURE)}]
typed = {}
for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai, mode=mode)
    typed[mode.name] = client.chat.completions.create(
        model="pocket", messages=asked, response_model=CountShapes, max_retries=0
    )
willing = OpenAI(base_url=f"{about.WILLING}/v1", api_key="none", max_retries=0)
client = instructor.from_openai(willing, mode=Mode.PARALLEL_TOOLS)
several = client.chat.completions.create(
    model="pocket", messages=asked, response_model=Iterable[count_shapes]
)
assert [each.shape for each in several] == ["circle"]
client = instructor.from_openai(openai, mode=Mode.TOOLS)
partial = list(
    client.chat.completions.create_partial(model="pocket", messages=asked, response_model=CountShapes)
)
typed["partial"] = CountShapes.model_validate(partial[-1].model_dump())
client = instructor.from_openai(openai, mode=Mode.RESPONSES_TOOLS)
shown = [
    {"type": "input_image", "image_url": about.DATA_URL},
    {"type": "input_text", "text": about.STRUCTURE},
]
typed["RESPONSES_TOOLS"] = client.responses.create(
    model="pocket", input=[{"role": "user", "content": shown}], response_model=CountShapes, max_retries=0
)
image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": about.DATA}}
block = [{"role": "user", "content": [image, {"type": "text", "text": about.STRUCTURE}]}]
client = instructor.from_anthropic(anthropic, mode=Mode.ANTHROPIC_TOOLS)
typed["ANTHROPIC_TOOLS"] = client.messages.create(
    model="pocket", max_tokens=200, messages=block, response_model=CountShapes, max_retries=0
)
assert all(isinstance(each, CountShapes) for each in typed.values()), typed

# These ask in words for JSON, which a model of shapes and colours doesn't write: only the request counts.
for client, messages in (
    (instructor.from_openai(openai, mode=Mode.JSON), asked),
    (instructor.from_openai(openai, mode=Mode.MD_JSON), asked),
    (instructor.from_anthropic(anthropic, mode=Mode.ANTHROPIC_JSON), block),
):
    options = {"model": "pocket", "max_tokens": 40, "messages": messages, "max_retries": 0}
    try:
        client.create(**options, response_model=CountShapes)
    except InstructorError as error:
        if isinstance(error.__cause__, APIError):  # refused instead of answered
            raise

asked = [{"role": "user", "content": about.openai_content(about.FIRST)}]
described = instructor.from_openai(openai).create(model="pocket", messages=asked, response_model=None)
about.report_loop(
    first=described.choices[0].message.content, turns=[], structured=typed["TOOLS"].model_dump()
)
