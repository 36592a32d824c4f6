"""Makes control characters of untrusted text visible, so that no terminal or browser obeys them."""

import re

PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
"""Unicode's pictures of the control characters of ASCII."""
OTHERS = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Delete, the second set of control characters, and marks that reverse the direction of text."""


def show_control_characters(value: object) -> str:
    """Return ``value`` as text without control characters, but for line breaks and tabs."""
    return OTHERS.sub(lambda found: f"<U+{ord(found[0]):04X}>", str(value).translate(PICTURES))
