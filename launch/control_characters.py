"""Replacement of control characters in untrusted text, which terminals and browsers would obey."""

import re

PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
"""Unicode symbols for the ASCII control characters."""
OTHERS = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Delete, the C1 control characters, and marks that reverse the direction of text."""


def show_control_characters(value: object) -> str:
    """Return ``value`` as text in which control characters other than \\n and \\t are visible."""
    return OTHERS.sub(lambda found: f"<U+{ord(found[0]):04X}>", str(value).translate(PICTURES))
