"""Saving and resuming a trainer: torch_dist checkpoints that are either complete or absent.

    directory         names, the ``latest`` pointer, publishing, cleanup; does not import Megatron
    writer            CheckpointWriter: writes while training continues
    loader            load_checkpoint, load_model_weights, find_damage
    checksums         checksums of all files, compared before loading
    pickled_metadata  safe reading of pickles from untrusted checkpoints
    state             the tensors of a trainer that a checkpoint contains
    gathered_state    memory-saving collection of optimizer state before saving
    streamed_state    memory-saving loading of optimizer state
    megatron_workarounds   workarounds for bugs of Megatron

Import these modules. This package exports nothing, so that looking for a checkpoint does not
import Megatron.
"""
