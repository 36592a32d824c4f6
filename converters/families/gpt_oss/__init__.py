"""Weights of GPT-OSS."""
