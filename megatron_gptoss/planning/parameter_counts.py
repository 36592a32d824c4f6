"""Number of parameters on one rank of a layout, and sizes of number formats."""

from megatron_gptoss.config import AdapterConfig, ModelConfig, ParallelConfig

MXFP4_BYTES = 17 / 32
"""Bytes per MXFP4 value: 4 bits, and an 8-bit scale per 32 values."""


def parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    stage: int = 0,
) -> tuple[float, float]:
    """Return the (dense, expert) parameters on one rank of a pipeline stage.

    Args:
        model: architecture.
        parallel: layout.
        stage: index of the pipeline stage.
    """
    layers = parallel.layers_of_stage(stage, model)
    dense = layers * model.layer_parameters(parallel.tensor)
    if stage == 0:
        dense += vocabulary_parameters(model, parallel)
    if stage == parallel.pipeline - 1:
        # The final norm has hidden_size parameters.
        dense += head_parameters(model, parallel) + model.hidden_size

    # Expert parallelism splits experts only. All other parameters exist on every expert rank.
    expert = layers * model.num_experts / parallel.expert * model.expert_parameters
    return dense, expert


def trained_parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig | None,
    stage: int = 0,
) -> tuple[float, float]:
    """Return the trained (dense, expert) parameters on one rank of a pipeline stage.

    Args:
        model: architecture.
        parallel: layout.
        adapter: trained adapters; None if all parameters are trained.
        stage: index of the pipeline stage.
    """
    if adapter is None:
        return parameters_per_gpu(model, parallel, stage)
    return adapter_parameters_per_gpu(model, parallel, adapter, stage)


def adapter_parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig,
    stage: int = 0,
) -> tuple[float, float]:
    """Return the (dense, expert) parameters of the adapters on one rank of a pipeline stage.

    Args:
        model: architecture.
        parallel: layout.
        adapter: adapters.
        stage: index of the pipeline stage.
    """
    layers = parallel.layers_of_stage(stage, model)
    layer_parameters, expert_parameters = adapter.layer_parameters(model, parallel.tensor)
    dense = layers * layer_parameters
    if stage == 0:
        dense += adapter.vocabulary_parameters(model, "embedding", parallel.tensor)
    if stage == parallel.pipeline - 1:
        dense += adapter.vocabulary_parameters(model, "head", parallel.tensor)
    return dense, layers * model.num_experts / parallel.expert * expert_parameters


def vocabulary_parameters(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the number of parameters in embedding or output layer on one rank."""
    return model.vocab_size * model.hidden_size / parallel.tensor


def head_parameters(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the output layer's number of parameters on one rank of the last stage.

    The result is 0 if the output layer shares the embedding's memory.
    """
    # With tied embeddings and several stages, the last stage has a copy of the embedding.
    if model.tied_embeddings and parallel.pipeline == 1:
        return 0.0
    return vocabulary_parameters(model, parallel)
