"""The base class of errors that the user can mend."""


class UserError(Exception):
    """An error that the user can mend; its message says how."""
