"""POST /v1/responses: stateless, so every request brings the whole conversation."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from snugvl.backends.protocol import Request
from snugvl.errors import RequestError
from snugvl.sampling import SamplingParams
from snugvl.server.context import context_of
from snugvl.server.generation import complete, generate
from snugvl.server.openai.common import EVENTS_DOCUMENT, json_answer
from snugvl.server.openai.formats import check_alone
from snugvl.server.openai.media import MediaSource
from snugvl.server.openai.responses_answer import finished, new_response, output_of
from snugvl.server.openai.responses_document import ResponseAnswer
from snugvl.server.openai.responses_input import conversation_of
from snugvl.server.openai.responses_schema import LOGPROBS, ResponseRequest
from snugvl.server.openai.responses_stream import ResponseEvents
from snugvl.server.openai.sampling import blaming
from snugvl.server.openai.upload import UploadRoute, attachments_of, multipart_document
from snugvl.server.streaming import event_stream

router = APIRouter(tags=["openai"], route_class=UploadRoute)

# What the engine calls a field of its own request, and what this protocol calls it.
NAMES = {
    "max_tokens": "max_output_tokens",
    r"prompt_ids|prompt|vision|messages.*": "input",
    "grammar|response_format": "text.format",
}


@router.post(
    "/v1/responses",
    response_model=ResponseAnswer,
    responses={200: EVENTS_DOCUMENT},
    openapi_extra=multipart_document(ResponseRequest),
)
async def create_response(body: ResponseRequest, http: HttpRequest) -> Response:
    """Answer input items with output items; whole, or as a stream of events."""
    context = context_of(http)
    model = context.check_model(body.model)
    media = MediaSource(context.intake, attachments_of(http))
    with blaming(NAMES):
        request = await _request(body, media)
        response = new_response(body, model)
        if body.stream:
            events = ResponseEvents(response, context.call_parser(request.tools))
            generation = await generate(context, request)
            return event_stream(http, context, events.run(generation), on_error=events.failed)
        choices, usage = await complete(context, request)
    output = output_of(choices[0], context.call_parser(request.tools))
    return json_answer(finished(response, output, choices[0].finish_reason, usage))


async def _request(body: ResponseRequest, media: MediaSource) -> Request:
    """What the engine is asked.

    Raises:
        RequestError, ImageError: with the path of the field to blame.
    """
    if body.top_logprobs is not None and not body.wants_logprobs:
        raise RequestError(f"top_logprobs needs {LOGPROBS!r} in include", field="top_logprobs")
    tools, grammar = body.tool_use(), body.grammar()
    check_alone(grammar, tools, "text.format")
    sampling = SamplingParams(
        max_tokens=body.max_output_tokens,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )
    messages = await conversation_of(body.input, body.instructions, media)
    media.check_all_used()
    return Request(messages, sampling, tools=tools, grammar=grammar)
