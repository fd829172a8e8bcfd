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

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        "potential_threat_level": {"type": "integer", "minimum": 0, "maximum": 2},
    },
    "required": ["title", "confidence", "potential_threat_level"],
}
FRIGATE_OLLAMA = "blakeblackshear/frigate frigate/genai/plugins/ollama.py 01f3369"
FRIGATE_OPENAI = "blakeblackshear/frigate frigate/genai/plugins/openai.py 06ce190"
KARAKEEP = "karakeep-app/karakeep packages/shared/inference.ts 1282322"
DIFY = "langgenius/dify-plugin-sdks python/dify_plugin/interfaces/model/openai_compatible/llm.py 0021d0c"
AIX = "src/modules/aix/server/dispatch/chatGenerate/adapters"
FRAMES = [
    {"type": "text", "text": "These are frames of a camera. Describe what happens."},
    {"type": "text", "text": "Frame 1 (08:00:01):"},
    {"type": "image_url", "image_url": {"url": "PICTURE_URL", "detail": "low"}},
    {"type": "text", "text": "Frame 2 (08:00:02):"},
    {"type": "image_url", "image_url": {"url": "PICTURE_URL", "detail": "low"}},
]

READ_FROM_SOURCE = [
    Shape(
        "Frigate, Ollama",
        FRIGATE_OLLAMA,
        "/api/chat",
        {
            "model": "pocket",
            "messages": [
                {
                    "role": "user",
                    "content": "Describe.\nFrame 1 (08:00:01):\n[img]\nFrame 2 (08:00:02):\n[img]",
                    "images": ["PICTURE", "PICTURE"],
                }
            ],
            "stream": False,
            "options": {"temperature": 0.5, "repeat_penalty": 1.05, "presence_penalty": 0.3},
            "format": SCHEMA,
            "think": False,
        },
    ),
    Shape(
        "Frigate, OpenAI",
        FRIGATE_OPENAI,
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": [{"role": "user", "content": FRAMES}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "review_metadata",
                    "strict": True,
                    "schema": {**SCHEMA, "additionalProperties": False},
                },
            },
        },
    ),
    Shape(
        "Karakeep, OpenAI",
        KARAKEEP,
        "/v1/chat/completions",
        {
            "model": "pocket",
            "max_tokens": 2048,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "schema",
                    "strict": True,
                    "schema": {
                        "type": "object",
                        "properties": {
                            "tags": {
                                "type": "array",
                                "items": {"type": "string", "maxLength": 8},
                                "maxItems": 3,
                            }
                        },
                        "required": ["tags"],
                        "additionalProperties": False,
                        "$schema": "http://json-schema.org/draft-07/schema#",
                    },
                },
            },
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Give me tags."},
                        {"type": "image_url", "image_url": {"url": "PICTURE_URL", "detail": "low"}},
                    ],
                }
            ],
        },
    ),
    Shape(
        "Karakeep, Ollama",
        KARAKEEP,
        "/api/generate",
        {
            "model": "pocket",
            "format": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3}},
                "required": ["tags"],
                "additionalProperties": False,
            },
            "stream": True,
            "options": {"num_ctx": 2048, "num_predict": 64},
            "prompt": "Give me tags.",
            "images": ["PICTURE"],
        },
    ),
    Shape(
        "Zed, Ollama",
        "zed-industries/zed crates/ollama/src/ollama.rs 0138cb1",
        "/api/chat",
        {
            "model": "pocket",
            "messages": [
                {"role": "system", "content": "You are an agent."},
                {"role": "user", "content": "What is this?", "images": ["PICTURE"]},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "get_state", "arguments": {"name": "lamp"}}}],
                    "thinking": None,
                },
                {"role": "tool", "tool_name": "get_state", "content": "on"},
                {"role": "assistant", "content": "It is on.", "tool_calls": None, "thinking": "The lamp."},
                {"role": "user", "content": "How many squares are there?"},
            ],
            "stream": True,
            "keep_alive": -1,
            "options": {
                "num_ctx": 16384,
                "num_predict": None,
                "stop": [],
                "temperature": 1.0,
                "top_p": None,
            },
            "tools": [TOOL],
            "think": None,
        },
    ),
    Shape(
        "Zed, OpenAI",
        "zed-industries/zed crates/open_ai/src/open_ai.rs 014676e",
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": [
                {"role": "system", "content": "You are an agent."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": "PICTURE_URL"}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
                },
                {"role": "tool", "content": [], "tool_call_id": "call_1"},
                {"role": "user", "content": "How many squares are there?"},
            ],
            "stream": True,
            "stream_options": USAGE,
            "max_completion_tokens": 32_000,
            "temperature": 1.0,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "tools": [TOOL],
            "prompt_cache_key": "thread-1",
            "reasoning_effort": "medium",
        },
    ),
    Shape(
        "Roo Code",
        "RooCodeInc/Roo-Code src/api/providers/openai.ts 003d9d4",
        "/v1/chat/completions",
        {
            "model": "pocket",
            "temperature": 0,
            "messages": [
                {
                    "role": "system",
                    "content": [
                        {"type": "text", "text": "You are Roo.", "cache_control": {"type": "ephemeral"}}
                    ],
                },
                *openai_history(content="")[1:5],
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}],
                },
            ],
            "stream": True,
            "stream_options": USAGE,
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "max_completion_tokens": 8192,
        },
    ),
    Shape(
        "Dify, its check of a model",
        DIFY,
        "/v1/chat/completions",
        {"model": "pocket", "max_tokens": 5, "messages": [{"role": "user", "content": "ping"}]},
    ),
    Shape(
        "Dify",
        DIFY,
        "/v1/chat/completions",
        {
            "model": "pocket",
            "stream": True,
            "temperature": 0.7,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "max_tokens": 512,
            "response_format": {"type": "text"},
            "messages": openai_history(content=""),
            "tools": [TOOL],
            "tool_choice": "auto",
            "stop": ["\nObservation"],
            "user": "abc-123",
        },
    ),
    Shape(
        "AnythingLLM",
        "Mintplex-Labs/anything-llm server/utils/AiProviders/genericOpenAi/index.js 01cf2fe",
        "/v1/chat/completions",
        {
            "model": "pocket",
            "stream": True,
            "messages": [
                {"role": "system", "content": "Given the context, answer.\nContext:\n[CONTEXT 0]:\na\n"},
                {"role": "user", "content": "What is this?"},
                {"role": "assistant", "content": "A picture."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "How many squares?"},
                        {"type": "image_url", "image_url": {"url": "PICTURE_URL", "detail": "high"}},
                    ],
                },
            ],
            "temperature": 0.7,
            "max_tokens": 1024,
        },
    ),
    Shape(
        "big-AGI",
        f"enricoros/big-AGI {AIX}/openai.chatCompletions.ts 0134cd6",
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": [
                {"role": "system", "content": "You are helpful.\n\n---\n\nToday is Thursday."},
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "PICTURE_URL", "detail": "high"}},
                        {"type": "text", "text": "What is this?"},
                    ],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "id": "call_1", "function": CALL}],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "on"},
                {"role": "user", "content": [{"type": "text", "text": "How many squares?"}]},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "max_tokens": 4096,
            "temperature": 0.5,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    Shape(
        "SillyTavern",
        "SillyTavern/SillyTavern src/endpoints/backends/chat-completions.js b588796",
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Write {{char}}'s next reply."},
                {"role": "system", "content": "[Start a new Chat]"},
                {"role": "assistant", "content": "Hello."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Look at this."},
                        {"type": "image_url", "image_url": {"url": "PICTURE_URL", "detail": "auto"}},
                    ],
                },
            ],
            "model": "pocket",
            "temperature": 1,
            "max_tokens": 300,
            "stream": True,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_p": 1,
            "top_k": 0,
            "stop": ["User:"],
            "logit_bias": {},
            "n": 1,
        },
    ),
    Shape(
        "browser-use",
        "browser-use/browser-use browser_use/llm/openai/chat.py 05b19a1",
        "/v1/chat/completions",
        {
            "model": "pocket",
            "messages": [
                {"role": "system", "content": "You are a browser agent."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Current page:"},
                        {"type": "image_url", "image_url": {"url": "PICTURE_URL", "detail": "auto"}},
                    ],
                },
            ],
            "temperature": 0.2,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "AgentOutput",
                    "strict": True,
                    "schema": {
                        "$defs": {
                            "Click": {
                                "type": "object",
                                "title": "Click",
                                "properties": {"index": {"type": "integer", "title": "Index"}},
                                "required": ["index"],
                                "additionalProperties": False,
                            },
                            "Done": {
                                "type": "object",
                                "title": "Done",
                                "properties": {"text": {"type": "string", "title": "Text"}},
                                "required": ["text"],
                                "additionalProperties": False,
                            },
                        },
                        "type": "object",
                        "title": "AgentOutput",
                        "properties": {
                            "memory": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Memory"},
                            "action": {
                                "type": "array",
                                "title": "Action",
                                "items": {"anyOf": [{"$ref": "#/$defs/Click"}, {"$ref": "#/$defs/Done"}]},
                            },
                        },
                        "required": ["memory", "action"],
                        "additionalProperties": False,
                    },
                },
            },
            "max_tokens": 200,
        },
    ),
    Shape(
        "LobeChat, Ollama",
        "lobehub/lobe-chat packages/model-runtime/src/providers/ollama/index.ts 5e912a4",
        "/api/chat",
        {
            "messages": [
                {"content": "You are helpful.", "role": "system"},
                {"content": "What is this?", "role": "user", "images": ["PICTURE"]},
                {"content": "", "role": "assistant"},
                {"content": "on", "role": "tool"},
                {"content": "How many squares?", "role": "user"},
            ],
            "model": "pocket",
            "options": {"frequency_penalty": 0, "presence_penalty": 0, "temperature": 0.5, "top_p": 1},
            "stream": True,
            "tools": [TOOL],
        },
    ),
    Shape(
        "langchaingo, Ollama (paperless-gpt)",
        "tmc/langchaingo llms/ollama/internal/ollamaclient/types.go 08f9f54",
        "/api/chat",
        {
            "model": "pocket",
            "messages": [{"role": "user", "content": "Transcribe this page.", "images": ["PICTURE"]}],
            "stream": False,
            "format": "",
            "options": {"num_ctx": 8192, "num_predict": 64, "top_k": 1, "temperature": 0},
        },
    ),
]
SHAPES += READ_FROM_SOURCE
