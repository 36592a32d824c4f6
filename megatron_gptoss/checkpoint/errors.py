"""Error of the checkpoint package."""

from megatron_gptoss.user_error import UserError


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or read. The message names it and the remedy."""
