"""Chat templates of ours, each with the marks of one form: as short as shows tools, calls and answers."""

from snugvl.core.messages import ToolForm

_TURNS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
CALLS
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def _template(calls: str, intro: str = "Call one if you need it.") -> str:
    shown = "{%- if tools -%}{{- 'INTRO\\n' + (tools | tojson) + '\\n' -}}{%- endif -%}"
    return shown.replace("INTRO", intro) + _TURNS.replace("CALLS", calls)


_EACH = "{%- for call in message.tool_calls or [] -%}{%- set f = call.function -%}BODY{%- endfor -%}"

HERMES = _template(
    _EACH.replace(
        "BODY",
        '{{- \'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' + (f.arguments | tojson)'
        " + '}\\n</tool_call>' -}}",
    )
)
QWEN_XML = _template(
    _EACH.replace(
        "BODY",
        "{{- '<tool_call>\\n<function=' + f.name + '>\\n' -}}"
        "{%- for key, value in f.arguments.items() -%}"
        "{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson)"
        " + '\\n</parameter>\\n' -}}{%- endfor -%}"
        "{{- '</function>\\n</tool_call>' -}}",
    )
)
LLAMA = _template(
    "{%- if message.tool_calls -%}{%- set f = message.tool_calls[0].function -%}"
    "{{- '{\"name\": \"' + f.name + '\", \"parameters\": ' + (f.arguments | tojson) + '}' -}}{%- endif -%}",
    "Environment: ipython",
)
LLAMA_SEVERAL = _template(
    _EACH.replace(
        "BODY",
        '{{- "{\\"name\\": \\"" + f.name + "\\", \\"parameters\\": " + (f.arguments | tojson) + "}" -}}'
        '{{- "; " if not loop.last -}}',
    ),
    "Environment: ipython",
)
MISTRAL = _template(
    "{%- if message.tool_calls -%}{{- '[TOOL_CALLS] [' -}}"
    "{%- for call in message.tool_calls -%}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \''
    " + (call.function.arguments | tojson | safe) + ', \"id\": \"' + call.id + '\"}' -}}"
    "{{- ', ' if not loop.last -}}{%- endfor -%}{{- ']' -}}{%- endif -%}"
)
MISTRAL_ARGS = _template(
    _EACH.replace("BODY", "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) -}}")
)
NONE = _template(_EACH.replace("BODY", "{{- '<calls>' + f.name + (f.arguments | tojson) + '</calls>' -}}"))

TEMPLATES = {
    "hermes": (HERMES, ToolForm("hermes")),
    "qwen-xml": (QWEN_XML, ToolForm("qwen-xml")),
    "llama": (LLAMA, ToolForm("llama", single=True)),
    "llama, several": (LLAMA_SEVERAL, ToolForm("llama")),
    "mistral": (MISTRAL, ToolForm("mistral")),
    "mistral-args": (MISTRAL_ARGS, ToolForm("mistral-args")),
    "none that we know": (NONE, ToolForm("hermes")),
    "no calls at all": (_template(""), ToolForm("hermes")),
}
