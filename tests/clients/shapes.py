"""What clients send that are no libraries: bodies as their sources build them, and where they do.

Each is a conversation in progress: a picture, a tool that was called and answered, the client's own knobs.
Values that the user chooses are the client's defaults.
"""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
CALL = {"name": "get_state", "arguments": '{"name": "lamp"}'}
PARAMETERS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "The name of the entity"},
        # zod's `z.record`, pydantic's `set`, and what Home Assistant and MCP servers write into schemas
        "labels": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        "areas": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
TOOL = {
    "type": "function",
    "function": {"name": "get_state", "description": "The state of an entity.", "parameters": PARAMETERS},
}


@dataclass(frozen=True)
class Shape:
    """A request of a client.

    Attributes:
        client: whose it is.
        source: repository, path and commit (its beginning) where the body is built.
        route: what it is posted to.
        body: what is sent. PICTURE_URL stands for a data URL, PICTURE for the same bytes in base64.
    """

    client: str
    source: str
    route: str
    body: Json


def openai_history(*, content: Any = None, answer: Any = "The lamp is on.", **called: Any) -> list[Json]:
    """A turn with a picture and an answered call, and the next question. called: more keys of the call."""
    picture = {"type": "image_url", "image_url": {"url": "PICTURE_URL", "detail": "auto"}}
    call = {"id": "call_1", "type": "function", "function": CALL, **called}
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "on"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "How many squares are there?"},
    ]


def ollama_history(**call: Any) -> list[Json]:
    """The same in Ollama's protocol. call: more keys of the call."""
    function = {"name": "get_state", "arguments": {"name": "lamp"}}
    return [
        {"role": "system", "content": "You are a voice assistant."},
        {"role": "user", "content": "What is this?", "images": ["PICTURE"]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function, **call}]},
        {"role": "tool", "content": '{"data": "on", "error": null}'},
        {"role": "user", "content": "How many squares are there?"},
    ]


WEBUI = "open-webui/open-webui backend/open_webui/utils/payload.py 05746a9"
CONTINUE = "continuedev/continue core/llm/openaiTypeConverters.ts 0228b89"
GUIDELLM = "guidellm 0.8.1 guidellm/backends/openai/request_handlers.py"
LM_EVAL = "lm-eval 0.4.13 lm_eval/models/openai_completions.py"
USAGE = {"include_usage": True}
THOUGHT = {"cot_id": "thought-1", "cot_summary": "The lamp's state has to be asked for."}

SHAPES = [
    Shape(
        "Open WebUI, OpenAI",
        WEBUI,
        "/v1/chat/completions",
        {
            "stream": True,
            "model": "pocket",
            "messages": openai_history(content="", index=0),
            "tools": [TOOL],
            "temperature": 0.8,
            "frequency_penalty": 0.0,
            "seed": 1,
            "max_tokens": 24,
            "stop": ["\n\n\n"],
            "stream_options": USAGE,
        },
    ),
    Shape(
        "Open WebUI, Ollama",
        WEBUI,
        "/api/chat",
        {
            "model": "pocket",
            "messages": ollama_history(index=0, id="call_1"),
            "stream": True,
            "tools": [TOOL],
            "keep_alive": "5m",
            "options": {
                "temperature": 0.8,
                "top_p": 0.9,
                "seed": 1,
                "num_predict": 24,
                "num_ctx": 2048,
                "num_batch": 512,
                "num_keep": 24,
                "num_thread": 2,
                "num_gpu": 1,
                "use_mmap": True,
                "tfs_z": 1.0,
                "repeat_last_n": 64,
                "new_topic_penalty": 0.0,
            },
        },
    ),
    Shape(
        "Continue, OpenAI",
        CONTINUE,
        "/v1/chat/completions",
        {
            "messages": openai_history(content=" "),
            "model": "pocket",
            "max_tokens": 4096,
            "temperature": 0,
            "stream": True,
            "tools": [TOOL],
        },
    ),
    Shape(
        "Continue, Ollama",
        "continuedev/continue core/llm/llms/Ollama.ts 0108be5",
        "/api/chat",
        {
            "model": "pocket",
            "messages": ollama_history(),
            "keep_alive": 1800,
            "stream": False,
            "tools": [TOOL],
            "options": {
                "num_predict": 24,
                "num_ctx": 32768,
                "mirostat": None,
                "use_mmap": True,
                "stop": "\n\n",
            },
        },
    ),
    Shape(
        "Cline",
        "cline/cline src/api/providers/openai.ts 0056692",
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": openai_history(content=""),
            "temperature": 0,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    Shape(
        "Home Assistant",
        "home-assistant/core homeassistant/components/ollama/entity.py 0d0db90",
        "/api/chat",
        {
            "model": "pocket",
            "messages": ollama_history(),
            "tools": [TOOL],
            "stream": True,
            "keep_alive": -1,
            "options": {"num_ctx": 8192},
            "think": False,
            "format": None,
        },
    ),
    Shape(
        "GitHub Copilot",
        "microsoft/vscode-copilot-chat src/extension/byok/node/openAIEndpoint.ts 092f70e",
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": [
                message | (THOUGHT if message["role"] == "assistant" else {})
                for message in openai_history(content="")
            ],
            "stream": True,
            "stream_options": USAGE,
            "temperature": 0.1,
            "top_p": 1,
            "n": 1,
            "tools": [TOOL],
        },
    ),
    Shape(
        "guidellm, chat",
        GUIDELLM,
        "/v1/chat/completions",
        {
            "model": "pocket",
            "stream": True,
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "messages": openai_history()[:2],
        },
    ),
    Shape(
        "guidellm, completions",
        GUIDELLM,
        "/v1/completions",
        {
            "model": "pocket",
            "stream": True,
            "max_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "prompt": "A red circle",
        },
    ),
    Shape(
        "guidellm, responses",
        GUIDELLM,
        "/v1/responses",
        {
            "model": "pocket",
            "stream": True,
            "max_output_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "PICTURE_URL"}]}],
        },
    ),
    Shape(
        "lm-eval, chat",
        LM_EVAL,
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Describe.", "type": "text"}],
            "model": "pocket",
            "max_tokens": 16,
            "temperature": 0,
            "stop": ["\n\n", "Q:"],
            "seed": 1234,
        },
    ),
    Shape(
        "lm-eval, generation",
        LM_EVAL,
        "/v1/completions",
        {
            "prompt": ["A red circle", "A blue square"],
            "model": "pocket",
            "max_tokens": 8,
            "temperature": 0,
            "stop": ["\n\n"],
            "seed": 1234,
        },
    ),
    Shape(
        "lm-eval, loglikelihood",
        LM_EVAL,
        "/v1/completions",
        {
            "model": "pocket",
            "prompt": "A red circle and a blue square",
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    ),
]
