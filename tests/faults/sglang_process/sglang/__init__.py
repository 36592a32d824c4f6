"""Replaces SGLang in the environment of a server of the fault-injection test."""
