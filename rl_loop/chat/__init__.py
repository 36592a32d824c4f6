"""Common parts of all chat formats: messages, tools, and the codec that renders and parses."""
