"""What can be wrong with data: a conversation, or all of it."""

from megatron_gptoss.user_error import UserError


class ConversationError(ValueError):
    """A conversation cannot be learned from; the message says why, and which message is to blame.

    Whoever reads the file adds the file and the line."""


class DataError(UserError, ValueError):
    """Data cannot be trained on at all; the message names the file, and the line if one is to
    blame."""
