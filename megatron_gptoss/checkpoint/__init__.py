"""Saving and resuming a trainer: torch_dist checkpoints that are either complete or absent.

    directory         names, the ``latest`` pointer, publishing and cleaning up; no Megatron
    writer            CheckpointWriter: writes while training goes on
    loader            load_checkpoint, load_model_weights, find_damage
    checksums         of every file, written with it and compared before it is loaded
    pickled_metadata  reads pickles of strangers without running them
    state             which tensors of a trainer are saved
    megatron_faults   what Megatron would save or load wrongly, and how we step around it

Import these modules; this one exports nothing, so that looking for a checkpoint does not import
Megatron.
"""
