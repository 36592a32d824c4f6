"""Families of models: what each of them is, apart from everything that serves all.

A family is a folder with ``config`` (a ModelConfig; imports no torch) and ``layers`` (how Megatron
builds it). ``registry`` knows all configurations, ``layer_registry`` all layers; names of weights and
the arithmetic that checks them are in ``converters.families``.
"""
