"""The chat template of exported models whose vocabulary is our own: Harmony in Jinja.

Models with the released vocabulary get the template of the checkpoint that they began with, which knows tools and
channels; this one is for people who want to talk to a small model of the demos."""

from rl_loop.harmony.codec import Harmony

FILE = "chat_template.jinja"

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


def chat_template(harmony: Harmony) -> str:
    """Return the template that renders users' and assistants' texts as ``harmony`` does, behind the
    system message that its configuration has."""
    system = harmony.decode(harmony.render_prompt([])).removesuffix(ASSISTANT)
    quoted = system.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{{- "{quoted}" -}}}}\n{MESSAGES}'
