"""Parameters of one rank of a layout, and the bytes of a number."""

from megatron_gptoss.config import AdapterConfig, ModelConfig, ParallelConfig

MXFP4_BYTES = 17 / 32
"""Of one value in MXFP4: four bits, and a scale for every 32."""


def bytes_of(dtype: str) -> int:
    """Return the bytes of one number of a dtype as OptimizerConfig names it."""
    return 2 if dtype == "bf16" else 4


def parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    stage: int = 0,
) -> tuple[float, float]:
    """Return (dense, expert) parameters of one rank of a pipeline stage."""
    layers = parallel.layers_of_stage(stage, model)
    dense = layers * model.layer_parameters(parallel.tensor)
    if stage == 0:
        dense += vocabulary_parameters(model, parallel)
    if stage == parallel.pipeline - 1:
        dense += head_parameters(model, parallel) + model.hidden_size

    expert = layers * model.num_experts / parallel.expert * model.expert_parameters
    return dense, expert


def trained_parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig | None,
    stage: int = 0,
) -> tuple[float, float]:
    """Return (dense, expert) parameters of one rank of a pipeline stage that are trained: those of
    the adapters, or all."""
    if adapter is None:
        return parameters_per_gpu(model, parallel, stage)
    return adapter_parameters_per_gpu(model, parallel, adapter, stage)


def adapter_parameters_per_gpu(
    model: ModelConfig,
    parallel: ParallelConfig,
    adapter: AdapterConfig,
    stage: int = 0,
) -> tuple[float, float]:
    """Return (dense, expert) parameters of the adapters of one rank of a pipeline stage."""
    layers = parallel.layers_of_stage(stage, model)
    of_layer, of_expert = adapter.layer_parameters(model, parallel.tensor)
    dense = layers * of_layer
    if stage == 0:
        dense += adapter.vocabulary_parameters(model, "embedding", parallel.tensor)
    if stage == parallel.pipeline - 1:
        dense += adapter.vocabulary_parameters(model, "head", parallel.tensor)
    return dense, layers * model.num_experts / parallel.expert * of_expert


def vocabulary_parameters(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the parameters of one rank's embedding or output layer."""
    return model.vocab_size * model.hidden_size / parallel.tensor


def head_parameters(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the parameters of the last stage's output layer; none where it is the embedding.

    A last stage that does not have the embedding has a copy of it.
    """
    if model.tied_embeddings and parallel.pipeline == 1:
        return 0.0
    return vocabulary_parameters(model, parallel)
