"""Backend whose engines run in the rollout workers.

Each engine holds the whole model. Weights are sent through Ray.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from converters.mxfp4_tensors import Digests, fake_quantize_experts
from megatron_gptoss.config import ModelConfig, Quantization
from megatron_gptoss.config.precision import torch_dtype
from rl_loop.engines.backend import BackendContext, EngineFactory, RolloutBackend
from rl_loop.engines.embedded.config import EmbeddedConfig
from rl_loop.engines.protocol import RolloutEngine
from rl_loop.weight_sync.source import WeightSource


class EmbeddedBackend(RolloutBackend):
    """One ``TransformersEngine`` in every rollout worker."""

    settings: EmbeddedConfig

    # An engine scores a text separately, between two steps of its batch.
    scores_during_rollouts = True

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
        # The trainer's ranks gather the weights while the driver logs the step. If only the engines
        # are quantized, this waits for the weights and rounds them in the driver.
        self._prepared = (source, self._convert_weights(source))

    def sync_weights(self, source: WeightSource, version: int) -> None:
        assert self.workers is not None
        prepared = self._prepared
        self._prepared = None
        if prepared is not None and prepared[0] is source:
            weights = prepared[1]
        else:
            weights = self._convert_weights(source)
        self.workers.load_weights(weights, version)

    def _convert_weights(self, source: WeightSource) -> Mapping[str, torch.Tensor]:
        """Return the weights in the format of the engines."""
        return weights_for_engine(source, self.context.quantization, self.settings.quantization)

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        assert self.workers is not None
        return self.workers.engine_scores(token_ids, temperature)

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]:
        assert self.workers is not None
        return self.workers.engine_rounding_errors(token_ids)

    def mxfp4_digests(self) -> list[Digests]:
        assert self.workers is not None
        return self.workers.engine_digests()

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {"engine": "transformers, embedded", "dtype": self.context.dtype}


def weights_for_engine(
    source: WeightSource, trained: Quantization | None, held: Quantization | None
) -> Mapping[str, torch.Tensor]:
    """Return the weights by Hugging Face name, in the form that engines hold.

    Args:
        source: trainer that has the weights.
        trained: format in which experts are trained. None: not quantized.
        held: format in which engines hold experts. None: the trainer's.

    Returns:
        Tensors in the shapes of their names. If experts are trained in MXFP4, their matrices are
        uint8 blocks [experts, rows, inputs / 32, 16] and scales [experts, rows, inputs / 32].
    """
    # Bits, so that engines can be compared with the trainer bit by bit.
    if trained is not None:
        return source.mxfp4_weights()
    weights = source.weights()
    return weights if held is None else fake_quantize_experts(weights)


def build_engine(
    model: ModelConfig, dtype: str, max_batch_size: int, deterministic: bool = False
) -> RolloutEngine:
    """Build an engine with random weights, which the first sync replaces.

    Args:
        model: configuration of the model.
        dtype: dtype of the weights.
        max_batch_size: number of sequences that are decoded together.
        deterministic: whether to decode one sequence at a time, without a prefix cache.
    """
    # Imported here, in the worker: the import of transformers takes seconds, which would block the
    # driver.
    from transformers import AutoConfig

    from rl_loop.engines.embedded.engine import TransformersEngine

    architecture = AutoConfig.for_model(**model.to_hf_config())
    return TransformersEngine.from_config(
        architecture,
        dtype=torch_dtype(dtype),
        max_batch_size=max_batch_size,
        deterministic=deterministic,
    )
