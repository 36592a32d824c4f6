"""Errors of a configuration, and of a machine that lacks what a configuration asks for."""

from megatron_gptoss.user_error import UserError


class ConfigError(UserError, ValueError):
    """A configuration file or an override is wrong; the message names the file and every key."""


class CannotStart(ConfigError):
    """Something that the run needs is not there; the message says what, under
    which key, and what to do."""
