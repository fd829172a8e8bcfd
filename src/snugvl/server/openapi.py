"""The OpenAPI document: every route with every answer it can give, in the form of its protocol."""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from snugvl.server.errors import Family, family_of

Responses = dict[int | str, dict[str, Any]]

MEANINGS = {
    400: "The request is wrong; the message says which field, which value and what to do.",
    401: "No API key, or a wrong one.",
    403: "A browser asked from a foreign page, or under a foreign name.",
    404: "The model is not served here.",
    405: "The path has other methods.",
    408: "The body came too slowly.",
    413: "Too many bytes, pixels or tokens; the message has the numbers and what fits.",
    431: "Too many or too long header lines.",
    429: "Too many requests; Retry-After says when to come back.",
    500: "The server failed; its log says why.",
    502: "The model's answer is not what the task asked for.",
    503: "The engine is starting, restarting or shutting down; Retry-After says when to come back.",
    504: "The deadline passed before the answer was complete.",
}
EVERYWHERE = (401, 403, 429, 431, 500)  # what the doors before the routes answer
WITH_BODY = (400, 404, 408, 413, 502, 503, 504)


class OpenAIErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """An error as OpenAI's API writes it."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """An error as Anthropic's API writes it."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class OllamaError(BaseModel):
    """An error as Ollama writes it."""

    error: str


FORMS: dict[Family, type[BaseModel]] = {
    "openai": OpenAIError,
    "anthropic": AnthropicError,
    "ollama": OllamaError,
}


def responses_of(*statuses: int, family: Family = "openai") -> Responses:
    """`responses=` of a route that answers with more errors than every route does.

    Not needed for what the doors answer and what any request with a body may get: `document` adds those.
    """
    return {status: {"model": FORMS[family], "description": MEANINGS[status]} for status in statuses}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`, with the errors that every route can answer."""
    values = get_openapi(
        title=app.title,
        version=app.version,
        summary="Vision-language models in the GPU memory people really have",
        routes=app.routes,
        tags=app.openapi_tags,
    )
    components = values.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for model in FORMS.values():
        _define(schemas, model)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in values.get("paths", {}).items():
        for operation in operations.values():
            _complete(operation, path)
    return values


def _complete(operation: dict[str, Any], path: str) -> None:
    """Add to an operation what it shares with others."""
    answers = operation["responses"]
    if "HTTPValidationError" in str(answers.get("422")):
        del answers["422"]
    takes = "requestBody" in operation or "parameters" in operation
    schema = {"$ref": f"#/components/schemas/{FORMS[family_of(path)].__name__}"}
    for status in sorted(EVERYWHERE + (WITH_BODY if takes else ())):
        answer = {"description": MEANINGS[status], "content": {"application/json": {"schema": schema}}}
        answers.setdefault(str(status), answer)
    if not open_to_all(path):
        operation["security"] = [{"bearer": []}, {"x-api-key": []}]


def open_to_all(path: str) -> bool:
    """Whether a path needs no API key: health, and the files of the page, which hold no secret."""
    return path in ("/", "/favicon.ico", "/health") or path.startswith(("/health/", "/page/"))


def _define(schemas: dict[str, Any], model: type[BaseModel]) -> None:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
