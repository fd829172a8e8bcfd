"""The request of a response."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from snugvl.backends.protocol import Grammar, Tool, ToolUse
from snugvl.server.fields import STRING_OR_OBJECT, WHOLE, Exact, Harmless
from snugvl.server.openai.common import Metadata
from snugvl.server.openai.formats import ANY_OBJECT, FormatName, JsonObjectFormat, TextFormat, schema_grammar
from snugvl.server.openai.responses_input import Input
from snugvl.server.openai.sampling import MaxTokens, Temperature, TopP
from snugvl.server.openai.tools import MAX_TOOLS, JsonSchema, Mode, ToolName, tool_use

LOGPROBS = "message.output_text.logprobs"
STATELESS = "this server keeps nothing between requests"


class FunctionTool(Exact):
    """A function. Its arguments always follow `parameters`, so `strict` changes nothing."""

    harmless: ClassVar[Harmless] = {"defer_loading": (False,), "output_schema": (), "allowed_callers": ()}

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class FunctionName(Exact):
    """One of the tools by its name."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Exact):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionName] = Field(min_length=1, max_length=MAX_TOOLS)


ToolChoice = Annotated[
    Annotated[Mode, Tag("string")]
    | Annotated[
        Annotated[FunctionName | AllowedFunctions, Field(discriminator="type")],
        Tag("object"),
    ],
    STRING_OR_OBJECT,
]


class SchemaFormat(Exact):
    """JSON that follows a schema; answers always do, so `strict` changes nothing."""

    type: Literal["json_schema"]
    name: FormatName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Exact):
    """The form of the answer."""

    harmless: ClassVar[Harmless] = {"verbosity": ("medium",)}

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class NoReasoning(Exact):
    """The models served here don't reason apart from their answer."""

    harmless: ClassVar[Harmless] = {
        "effort": ("none",),
        "summary": ("auto",),
        "generate_summary": ("auto",),
    }


class ResponseStreamOptions(Exact):
    """What a stream tells besides its events."""

    harmless: ClassVar[Harmless] = {"include_obfuscation": (False,)}


class ResponseRequest(Exact):
    """A response to make. Nothing is stored: `store` is false here by default."""

    harmless: ClassVar[Harmless] = {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory",),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "max_tool_calls": (),
        "moderation": (),
        "context_management": (),
    }
    instead: ClassVar = {
        "store": f"{STATELESS}; leave it out or send false",
        "previous_response_id": f"{STATELESS}; send the earlier input and output items again in input",
        "conversation": f"{STATELESS}; send the earlier input and output items again in input",
        "background": f"{STATELESS}; wait for the answer, or stream it",
        "prompt": f"{STATELESS}, so it knows no prompt templates; send the text in instructions and input",
        "truncation": "leave it out or send 'disabled', and shorten input yourself",
        "service_tier": "this server has one tier; leave it out or send 'auto'",
        "context_management": "shorten input yourself",
    }

    input: Input
    model: str | None = Field(None, description="one of GET /v1/models; by default the first")
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    metadata: Metadata | None = None
    reasoning: NoReasoning | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens come with their log-probabilities."""
        return LOGPROBS in (self.include or ())

    def tool_use(self) -> ToolUse | None:
        """What the tools ask of the engine.

        Raises:
            RequestError: tools and choice don't fit.
        """
        offered = tuple(
            Tool(tool.name, tool.description or "", tool.parameters or {}) for tool in self.tools or ()
        )
        parallel = self.parallel_tool_calls
        match self.tool_choice:
            case FunctionName(name=name):
                return tool_use(offered, named=name, parallel=parallel)
            case AllowedFunctions(mode=mode, tools=allowed):
                names = [tool.name for tool in allowed]
                return tool_use(offered, mode, allowed=names, parallel=parallel)
            case choice:
                return tool_use(offered, choice, parallel=parallel)

    def grammar(self) -> Grammar | None:
        """The grammar of the answer; None for plain text."""
        match self.text.format if self.text else None:
            case JsonObjectFormat():
                return ANY_OBJECT
            case SchemaFormat(schema_=schema):
                return schema_grammar(schema)
            case _:
                return None
