"""Fault injection in the engine's weights. Trainer faults are fields of its configuration."""

from collections.abc import Callable, Mapping

import torch

from megatron_gptoss.layers.no_sink import NO_SINK
from rl_loop.config.training import AblationConfig
from rl_loop.weight_sync.source import WeightSender, WeightSource


class FaultyWeights:
    """WeightSource that alters the tensors of another WeightSource."""

    def __init__(self, source: WeightSource, ablation: AblationConfig, seed: int) -> None:
        self._source = source
        self._ablation = ablation
        self._seed = seed

    def weights(self) -> dict[str, torch.Tensor]:
        return engine_weights(self._source.weights(), self._ablation, self._seed)

    def mxfp4_weights(self) -> dict[str, torch.Tensor]:
        # With quantization, only the sinks are altered, which are not MXFP4.
        return engine_weights(self._source.mxfp4_weights(), self._ablation, self._seed)

    def release_memory(self) -> None:
        self._source.release_memory()

    def send_weights(self, sender: WeightSender) -> None:
        raise NotImplementedError(
            "the configuration rejects engine faults if tensors do not pass through the driver"
        )


def engine_faults(
    ablation: AblationConfig, seed: int
) -> Callable[[WeightSource, int], WeightSource] | None:
    """Return a function that alters the weights of a version for the engines.

    Args:
        ablation: faults to inject.
        seed: seed of the noise, to which the version is added.

    Returns:
        Function of a source and a version, or None without faults.
    """
    if not ablation.changes_engine_weights:
        return None
    return lambda source, version: FaultyWeights(source, ablation, seed + version)


def engine_weights(
    weights: Mapping[str, torch.Tensor], ablation: AblationConfig, seed: int
) -> dict[str, torch.Tensor]:
    """Return the weights with the faults of an ablation.

    Args:
        weights: weights by Hugging Face name.
        ablation: faults to inject.
        seed: seed of the noise.
    """
    # The trainer's tensors are not changed.
    altered = dict(weights)
    if "engine_sinks" in ablation.without:
        for name, tensor in weights.items():
            if name.endswith(".sinks"):
                altered[name] = torch.full_like(tensor, NO_SINK)

    if ablation.engine_noise:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in altered.items():
            # Drawn on the CPU in fp32, so that a seed gives the same noise on any device and for
            # any dtype.
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            # Relative to the spread of each tensor, so that one setting suits norms, biases and
            # matrices.
            deviation = tensor.float().std(unbiased=False).item()
            altered[name] = tensor + ablation.engine_noise * deviation * noise
    return altered
