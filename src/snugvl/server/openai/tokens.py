"""POST /tokenize and /detokenize, as vLLM has them: what a model reads, without an answer."""

from typing import Annotated, ClassVar

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest

from snugvl.core.messages import Request
from snugvl.errors import RequestError
from snugvl.server.body import JsonRoute
from snugvl.server.context import context_of
from snugvl.server.fields import WHOLE, Body
from snugvl.server.forms import MAX_TOOLS
from snugvl.server.generation import tokens_of
from snugvl.server.metrics import record_of
from snugvl.server.openai.chat_request import (
    MAX_MESSAGES,
    ChatMessage,
    ChatTool,
    chat_tool_use,
    conversation_of,
)
from snugvl.server.openai.common import TemplateVariables, template_of
from snugvl.server.unsupported import TOKENIZE, UnsupportedFields

MAX_IDS = 262_144  # the longest context there is

router = APIRouter(tags=["tokens"], route_class=JsonRoute)


class TokenizeRequest(Body):
    """A text, or a conversation with its tools."""

    unsupported: ClassVar[UnsupportedFields] = TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: TemplateVariables | None = None


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31), WHOLE]], Field(max_length=MAX_IDS, fail_fast=True)
    ]


class TokenizeReport(BaseModel):
    """A prompt as the model reads it, in vLLM's form."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    image_tokens: int = Field(description="How many of `tokens` stand for pictures.")


class DetokenizeReport(BaseModel):
    """The text of token ids, in vLLM's form."""

    prompt: str


@router.post("/tokenize")
async def tokenize(http: HttpRequest, body: TokenizeRequest) -> TokenizeReport:
    """Token ids of a text as it is, or of a conversation through the chat template."""
    context = context_of(http)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", field="prompt")
    if body.prompt is not None:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise RequestError(f"{name} belong to messages, not to a prompt", field=name)
        request = Request(prompt=body.prompt)
    else:
        media = context.media_to_count(record_of(http.scope), attachments={})
        tools = chat_tool_use(body.tools, None, None, media.notes)
        conversation = await conversation_of(body.messages or [], media)
        request = Request(conversation, tools=tools, template=template_of(body.chat_template_kwargs))
    found = await tokens_of(context, request)
    return TokenizeReport(
        count=len(found.ids),
        max_model_len=context.capabilities.context_tokens,
        tokens=found.ids,
        image_tokens=found.image_tokens,
    )


@router.post("/detokenize")
async def detokenize(request: HttpRequest, body: DetokenizeRequest) -> DetokenizeReport:
    """The text of token ids."""
    context = context_of(request)
    context.check_model(body.model)
    return DetokenizeReport(prompt=await context.service.detokenize(tuple(body.tokens)))
