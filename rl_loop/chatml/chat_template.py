"""Chat template of exported models with a tiny vocabulary: ChatML with tools in Jinja.

It renders the same text as Qwen2.5's template. ``default_system`` replaces a missing system message
and is left out if it is empty. Models with a released tokenizer keep the template of their initial
checkpoint.
"""

CHAT_TEMPLATE = r"""
{%- set first_is_system = messages and messages[0].role == "system" -%}
{%- set system = messages[0].content if first_is_system else default_system -%}
{%- if system or first_is_system or tools %}{{ "<|im_start|>system\n" + system }}{% endif -%}
{%- if tools -%}
{%- if system or first_is_system %}{{ "\n\n" }}{% endif -%}
{{ "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" -}}
{{ "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" -}}
{%- for tool in tools %}{{ "\n" + (tool | tojson) }}{% endfor -%}
{{ "\n</tools>\n\nFor each function call, return a json object with function name and arguments " -}}
{{ "within <tool_call></tool_call> XML tags:\n<tool_call>\n" -}}
{{ '{"name": <function-name>, "arguments": <args-json-object>}' + "\n</tool_call>" -}}
{%- endif -%}
{%- if system or first_is_system or tools %}{{ "<|im_end|>\n" }}{% endif -%}
{%- for message in messages -%}
{%- if loop.first and first_is_system -%}
{%- elif message.role == "tool" -%}
{%- if loop.first or loop.previtem.role != "tool" %}{{ "<|im_start|>user" }}{% endif -%}
{{ "\n<tool_response>\n" + message.content + "\n</tool_response>" -}}
{%- if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>\n" }}{% endif -%}
{%- else -%}
{{ "<|im_start|>" + message.role + "\n" -}}
{{ message.content or "" -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if message.content or not loop.first %}{{ "\n" }}{% endif -%}
{{ '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
{{ (function.arguments | tojson) + "}\n</tool_call>" -}}
{%- endfor -%}
{{ "<|im_end|>\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif -%}
"""
