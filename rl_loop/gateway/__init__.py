"""OpenAI's API for the policy.

Agents that do not depend on this project sample from it, and every sampled token is recorded.
"""
