"""Errors of conversations and data files."""

from megatron_gptoss.user_error import UserError


class ConversationError(ValueError):
    """Conversation that cannot be trained on. The message names the reason and the message's index.

    Callers that read the file add the file and the line.
    """


class DataError(UserError, ValueError):
    """Data that cannot be used. The message names the file, and the line if one is at fault."""
