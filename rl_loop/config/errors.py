"""The error of a wrong configuration."""


class ConfigError(ValueError):
    """A configuration file or an override is wrong; the message names the file and every key."""
