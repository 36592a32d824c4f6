"""The chat template of exported models whose vocabulary is our own: Harmony in Jinja.

Models with the released vocabulary get the template of the checkpoint that they began with, which knows tools and
channels; this one is for people who want to talk to a small model of the demos."""

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
    """Return the template that renders users' and assistants' texts behind ``system``, the rendered
    system message of a configuration."""
    quoted = system.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{{- "{quoted}" -}}}}\n{MESSAGES}'
