"""What every chat format has: messages of the policy, tools, and the codec that renders and parses."""
