"""What a ChatML prompt says besides the conversation: ``chatml`` of a configuration."""

from pydantic import BaseModel, ConfigDict

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class ChatMlConfig(BaseModel):
    """What a ChatML prompt says besides the conversation, for families that speak ChatML."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    system: str | None = QWEN_SYSTEM
    """The system message of a conversation that has none of its own, which is what the model's chat
    template says there; the default is Qwen2.5's. null leaves it out."""
    describe_tools: bool = True
    """Whether the system message describes an environment's tools. Off, a prompt is some two
    hundred tokens shorter: for a policy that has learned from demonstrations how it calls them."""
