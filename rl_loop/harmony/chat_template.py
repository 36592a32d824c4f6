"""Chat template of exported models with a tiny vocabulary: Harmony in Jinja.

Models with the released vocabulary get the template of their initial checkpoint, which has tools
and channels. This template is for chats with small models of the demos.
"""

ASSISTANT = "<|start|>assistant"

MESSAGES = """\
{%- if tools %}{{ raise_exception("this template knows no tools") }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == "user" -%}
{{ "<|start|>user<|message|>" + message.content + "<|end|>" }}
{%- elif message.role == "assistant" -%}
{{ "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- else -%}
{{ raise_exception("this template knows user and assistant, not " + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif -%}
"""


def chat_template(system: str) -> str:
    """Return the template for users' and assistants' texts behind a rendered system message."""
    # Jinja reads the message as a string literal.
    quoted = system.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{{- "{quoted}" -}}}}\n{MESSAGES}'
