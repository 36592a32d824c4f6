"""The backend whose engines live in the rollout workers: each holds the whole model, and
weights go through Ray."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from converters.mxfp4_tensors import Digests, fake_quantize_experts
from megatron_gptoss.config import ModelConfig, Quantization
from rl_loop.engines.backend import BackendContext, EngineFactory, RolloutBackend
from rl_loop.engines.embedded.config import EmbeddedConfig
from rl_loop.engines.protocol import RolloutEngine
from rl_loop.weight_sync.source import WeightSource


class EmbeddedBackend(RolloutBackend):
    """One ``TransformersEngine`` in every rollout worker."""

    settings: EmbeddedConfig

    # An engine scores a text by itself, between two steps of its batch.
    scores_beside_rollouts = True

    def engine_factory(self) -> EngineFactory:
        return partial(
            build_engine,
            model=self.context.model,
            dtype=self.context.dtype,
            max_batch_size=self.settings.max_batch_size,
            deterministic=self.settings.deterministic,
        )

    def __init__(self, settings: EmbeddedConfig, context: BackendContext) -> None:
        super().__init__(settings, context)
        self._prepared: tuple[WeightSource, Mapping[str, torch.Tensor]] | None = None

    def prepare_sync(self, source: WeightSource) -> None:
        # The trainer's ranks gather them while the driver writes what the step was like.
        self._prepared = (source, self._weights_of(source))

    def sync_weights(self, source: WeightSource, version: int) -> None:
        assert self.workers is not None
        prepared = self._prepared
        self._prepared = None
        if prepared is not None and prepared[0] is source:
            weights = prepared[1]
        else:
            weights = self._weights_of(source)
        self.workers.load_weights(weights, version)

    def _weights_of(self, source: WeightSource) -> Mapping[str, torch.Tensor]:
        return weights_for_engine(source, self.context.quantization, self.settings.quantization)

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        assert self.workers is not None
        return self.workers.engine_scores(token_ids, temperature)

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        assert self.workers is not None
        return self.workers.engine_rounding_errors(token_ids)

    def packed_digests(self) -> list[Digests]:
        assert self.workers is not None
        return self.workers.engine_digests()

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {"engine": "transformers, embedded", "dtype": self.context.dtype}


def weights_for_engine(
    source: WeightSource, trained: Quantization | None, held: Quantization | None
) -> Mapping[str, torch.Tensor]:
    """Return the weights by Hugging Face name in the form that engines hold.

    Args:
        source: the trainer.
        trained: format that experts are trained through; None if there is none.
        held: format that engines are to hold experts in; None for the trainer's.
    """
    if trained is not None:
        return source.packed_weights()
    weights = source.weights()
    return weights if held is None else fake_quantize_experts(weights)


def build_engine(
    model: ModelConfig, dtype: str, max_batch_size: int, deterministic: bool = False
) -> RolloutEngine:
    """Build an engine with random weights, which the first sync replaces."""
    # Imported in the worker: transformers takes seconds, which the driver need not wait for.
    from transformers import AutoConfig

    from rl_loop.engines.embedded.engine import TransformersEngine

    architecture = AutoConfig.for_model(**model.to_hf_config())
    return TransformersEngine.from_config(
        architecture,
        dtype=getattr(torch, dtype),
        max_batch_size=max_batch_size,
        deterministic=deterministic,
    )
