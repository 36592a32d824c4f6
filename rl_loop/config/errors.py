"""Errors of a configuration, and of a machine that does not meet a configuration's requirements."""

from megatron_gptoss.user_error import UserError


class ConfigError(UserError, ValueError):
    """A configuration file or an override is wrong. The message names the file and every key."""


class StartError(ConfigError):
    """A requirement of the run is missing. The message names it, its key and a remedy."""
