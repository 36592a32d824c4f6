"""What is raised when a checkpoint cannot be written or read."""

from megatron_gptoss.user_error import UserError


class CheckpointError(UserError, RuntimeError):
    """A checkpoint could not be written or read; the message names it and what to do."""
