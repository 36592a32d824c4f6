"""Base class of errors that the user can correct."""


class UserError(Exception):
    """Error that the user can correct. The message names the remedy."""
