"""The error of a wrong configuration."""

from megatron_gptoss.user_error import UserError


class ConfigError(UserError, ValueError):
    """A configuration file or an override is wrong; the message names the file and every key."""
