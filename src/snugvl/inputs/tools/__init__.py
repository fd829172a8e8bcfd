"""Calls of tools, in the form that each model was trained on: a parser and a grammar for each.

| form | written as |
|---|---|
| hermes | `<tool_call>{"name": "f", "arguments": {…}}</tool_call>` |
| llama | `{"name": "f", "parameters": {…}}`, after `<|python_tag|>` or at the beginning of a line |
| mistral | `[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]` |
| mistral-args | `[TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]…` |
| qwen-xml | `<tool_call><function=f><parameter=a>…</parameter></function></tool_call>` |

`forms` tells a model's form by its chat template. The grammar of a request with tools allows nothing but
valid calls; what else a parser reads is for text that was made without it. The server imports this: no torch.
"""
