"""Faults on purpose in the engine's weights; those in the trainer are fields of its own configuration."""

from collections.abc import Callable

import torch

from megatron_gptoss.layers.attention import NO_SINK
from rl_loop.config.training import AblationConfig
from rl_loop.engines.backend import WeightSender, WeightSource


class FaultyWeights:
    """A WeightSource that alters another one's tensors."""

    def __init__(self, source: WeightSource, ablation: AblationConfig, seed: int) -> None:
        self._source = source
        self._ablation = ablation
        self._seed = seed

    def weights(self) -> dict[str, torch.Tensor]:
        return engine_weights(self._source.weights(), self._ablation, self._seed)

    def send_weights(self, sender: WeightSender) -> None:
        raise NotImplementedError("the configuration refuses engine faults where the driver does not see the tensors")


def engine_faults(ablation: AblationConfig, seed: int) -> Callable[[WeightSource, int], WeightSource] | None:
    """Return what alters the weights of a version on their way to the engines; None without such faults.

    ``seed``: of the noise, which is another one for every version."""
    if ablation.engine_sinks and not ablation.engine_noise:
        return None
    return lambda source, version: FaultyWeights(source, ablation, seed + version)


def engine_weights(weights: dict[str, torch.Tensor], ablation: AblationConfig, seed: int) -> dict[str, torch.Tensor]:
    """The weights by Hugging Face name as the engine gets them: the trainer's unless the ablation says otherwise."""
    if not ablation.engine_sinks:
        weights = {n: torch.full_like(w, NO_SINK) if n.endswith(".sinks") else w for n, w in weights.items()}
    if ablation.engine_noise:
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: w + ablation.engine_noise * w.float().std(unbiased=False).item() * _normal(w, generator)
            for name, w in weights.items()
        }
    return weights


def _normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator).to(like)
