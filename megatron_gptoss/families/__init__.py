"""Model families, one folder per family.

A family has ``config`` (a ModelConfig, without torch) and ``layers`` (modules for Megatron).
``registry`` lists all configurations and ``layer_registry`` all layers. ``converters.families`` has
the names of the weights.
"""
