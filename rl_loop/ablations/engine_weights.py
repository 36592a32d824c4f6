"""Faults on purpose in the engine's weights; those in the trainer are fields of
its own configuration."""

from collections.abc import Callable, Mapping

import torch

from megatron_gptoss.layers.no_sink import NO_SINK
from rl_loop.config.training import AblationConfig
from rl_loop.weight_sync.source import WeightSender, WeightSource


class FaultyWeights:
    """A WeightSource that alters another one's tensors."""

    def __init__(self, source: WeightSource, ablation: AblationConfig, seed: int) -> None:
        self._source = source
        self._ablation = ablation
        self._seed = seed

    def weights(self) -> dict[str, torch.Tensor]:
        return engine_weights(self._source.weights(), self._ablation, self._seed)

    def packed_weights(self) -> dict[str, torch.Tensor]:
        # The sinks, which are all that is altered with quantization, are not packed.
        return engine_weights(self._source.packed_weights(), self._ablation, self._seed)

    def release_memory(self) -> None:
        self._source.release_memory()

    def send_weights(self, sender: WeightSender) -> None:
        raise NotImplementedError(
            "the configuration refuses engine faults where the driver does not see the tensors"
        )


def engine_faults(
    ablation: AblationConfig, seed: int
) -> Callable[[WeightSource, int], WeightSource] | None:
    """Return what alters the weights of a version on their way to the engines; None without such
    faults.

    ``seed``: of the noise, which is another one for every version."""
    if not ablation.changes_engine_weights:
        return None
    return lambda source, version: FaultyWeights(source, ablation, seed + version)


def engine_weights(
    weights: Mapping[str, torch.Tensor], ablation: AblationConfig, seed: int
) -> dict[str, torch.Tensor]:
    """Return the weights by Hugging Face name as the engine gets them, with the ablation's
    faults."""
    # The trainer's own tensors stay as they are.
    altered = dict(weights)
    if "engine_sinks" in ablation.without:
        for name, tensor in weights.items():
            if name.endswith(".sinks"):
                altered[name] = torch.full_like(tensor, NO_SINK)

    if ablation.engine_noise:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in altered.items():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            deviation = tensor.float().std(unbiased=False).item()
            altered[name] = tensor + ablation.engine_noise * deviation * noise
    return altered
