"""Anthropic's routes: POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request

from snugvl.server.anthropic.answers import Answer, MessageOut, TokenCount
from snugvl.server.anthropic.conversation import conversation_of, request_of, tools_of
from snugvl.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from snugvl.server.body import JsonRoute
from snugvl.server.ceiling import generate_within
from snugvl.server.context import context_of
from snugvl.server.generation import counting, tokens_of
from snugvl.server.reader import Reader
from snugvl.server.streaming import event_stream, events_document

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"], route_class=JsonRoute)

EVENTS: Final = events_document(
    "message_start, ping, content_block_start, content_block_delta, content_block_stop, message_delta, "
    "message_stop, error"
)


@router.post("", response_model=MessageOut, responses={200: {"content": EVENTS}})
async def post_messages(http: Request, asked: MessagesRequest) -> Any:
    """Continue a conversation, with pictures, tools and structured outputs."""
    context = context_of(http)
    name = context.check_model(asked.model)
    request = await request_of(context, asked)
    reader = Reader(await generate_within(context, request), context.call_parser(request.tools))
    answer = Answer(name, reader, asked.max_tokens)
    return event_stream(http, context, answer.events()) if asked.stream else await answer.whole()


@router.post("/count_tokens", response_model=TokenCount)
async def post_count_tokens(http: Request, asked: CountTokensRequest) -> Any:
    """Count the tokens of a conversation, without continuing it."""
    context = context_of(http)
    context.check_model(asked.model)
    with counting(context):
        conversation = await conversation_of(context, asked)
    tokens = await tokens_of(context, conversation, tools_of(asked))
    return TokenCount(input_tokens=len(tokens.ids))
