"""Options of a ChatML prompt: ``chatml`` of a configuration."""

from pydantic import BaseModel, ConfigDict

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class ChatMlConfig(BaseModel):
    """Options of a ChatML prompt, for model families with this chat format."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    system: str | None = QWEN_SYSTEM
    """System message of conversations without one. Use the text of the model's chat template.
    Default: Qwen2.5's text. null: none."""
    describe_tools: bool = True
    """Describe an environment's tools in the system message. false saves some 200 tokens per
    prompt, for policies that learned the calls from demonstrations."""
