"""OpenAI's API in front of the policy: agents that know nothing of us sample from it, and what they
sample is captured token by token."""
