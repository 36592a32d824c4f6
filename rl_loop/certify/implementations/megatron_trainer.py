"""Trainer of this project: Megatron-Core on packed rows, on one GPU or on the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from converters.hf_directory import HfDirectory
from converters.model_weights import export_hf_weights, load_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.config.precision import Precision, torch_dtype
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.samples import ROUTES, TrainingSamples
from megatron_gptoss.step_results import LossOutput
from megatron_gptoss.trainer import PolicyTrainer
from rl_loop.certify.harmony_tokens import HarmonyMessage
from rl_loop.certify.implementation import (
    ModelImplementation,
    ScoredSequence,
    UnsupportedOperationError,
)
from rl_loop.certify.model import find_vocabulary
from rl_loop.cluster.placement import free_port
from rl_loop.harmony.codec import Harmony, ParsedMessage, PromptConfig, ToolOutput

IDLE_RATE = 1e-12
"""Learning rate. The step that computes gradients ends with an update, which is undone."""


class MegatronTrainer(ModelImplementation):
    """One rank of the trainer. Only one may exist in a process."""

    name = "the trainer (Megatron-Core)"

    def __init__(self, directory: Path, precision: Precision, **overrides: Any) -> None:
        """Build the model of ``directory``. ``overrides`` are passed to ``build_model``."""
        self._directory = directory
        self.config = HfDirectory(directory).config
        distributed.initialize(ParallelConfig(), port=free_port())
        try:
            model = build_model(self.config, ParallelConfig(), torch_dtype(precision), **overrides)
            self._load(model, directory)
        # ``initialize`` refuses a second set of process groups, so leave none behind.
        except BaseException:
            distributed.shutdown()
            raise
        # Clipping would scale the gradients that are compared.
        self.trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))

    def _load(self, model: torch.nn.Module, directory: Path) -> None:
        load_hf_weights(model, self.config, HfDirectory(directory).get)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        """Score each sequence in a separate row."""
        return [self._score_row([sequence])[0] for sequence in sequences]

    def score_packed(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        """Score all sequences in one packed row."""
        return self._score_row(sequences)

    def score_with_routes(
        self, sequences: Sequence[Sequence[int]], routes: Sequence[np.ndarray]
    ) -> list[ScoredSequence]:
        """Score sequences with replayed routes (R3)."""
        return self._score_row(sequences, routes)

    def _score_row(
        self, sequences: Sequence[Sequence[int]], routes: Sequence[np.ndarray] | None = None
    ) -> list[ScoredSequence]:
        batch = build_batch(_samples(sequences, routes))
        self.trainer.replay = replay = RoutingReplay(self.trainer.module)
        replay.start_recording()
        try:
            (log_probs,) = self.trainer.score([batch])
            (recorded,) = replay.recorded()
        # The trainer is used again, and would keep recording.
        finally:
            self.trainer.replay = None
            for layer in replay.layers:
                layer.router.replay = None

        chosen = torch.stack(recorded.layers, dim=1).cpu().numpy()
        results = []
        start = 0
        # A sequence has one input less than tokens. The inputs of all sequences follow each other
        # in the row.
        for sequence in sequences:
            end = start + len(sequence) - 1
            results.append(ScoredSequence(log_probs[start:end].tolist(), chosen[start:end]))
            start = end
        return results

    def gradients(self, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Run one training step and export Megatron's gradients in place of the weights."""
        tokens = sum(len(sequence) - 1 for sequence in sequences)

        def loss(log_probs: Tensor, entropy: Tensor, batch: PackedBatch) -> LossOutput:
            # Divide by the tokens of all sequences, because gradients of micro-batches are summed.
            total = -(log_probs * (batch.loss_mask > 0)).sum() / tokens
            return LossOutput(total, {"loss": total})

        batches = [build_batch(_samples([sequence])) for sequence in sequences]
        self.trainer.train_step(batches, loss, learning_rate=IDLE_RATE)

        # The converters read a parameter's ``data``. Replace it by the gradient temporarily. Then
        # gradients get Hugging Face's names and layouts like weights.
        parameters: list[Any] = list(self.trainer.module.parameters())
        weights = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.main_grad
        exported = export_hf_weights(self.trainer.module, self.config)
        gradients = {name: tensor.float().cpu().clone() for name, tensor in exported}
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight

        # The step has also changed the weights, by about IDLE_RATE. Load them again.
        self._load(self.trainer.module, self._directory)
        return gradients

    def load_weights(self, directory: Path) -> None:
        """Load other weights into the model."""
        self._directory = directory
        self._load(self.trainer.module, directory)

    def render(self, messages: Sequence[HarmonyMessage]) -> list[int]:
        """Render with this project's codec.

        The assistant's messages are rendered as in demonstrations, tools' messages as in episodes.
        """
        vocabulary = find_vocabulary(self._directory, self.config.vocab_size)
        if vocabulary is None:
            raise UnsupportedOperationError("the vocabulary is not known")

        harmony = Harmony(vocabulary, PromptConfig())
        ids: list[int] = []
        for message in messages:
            ids += _render_message(harmony, message)
        return ids

    def close(self) -> None:
        """Destroy the process groups."""
        distributed.shutdown()


def _samples(
    sequences: Sequence[Sequence[int]], routes: Sequence[np.ndarray] | None = None
) -> TrainingSamples:
    """Build samples. Every token except the first is a label."""
    sequence_columns = []
    for number, sequence in enumerate(sequences):
        columns: dict[str, Any] = {
            "token_ids": list(sequence),
            "loss_mask": [0] + [1] * (len(sequence) - 1),
        }
        if routes is not None:
            columns[ROUTES] = routes[number].astype(np.int16)
        sequence_columns.append(columns)
    return TrainingSamples.join(sequence_columns)


def _render_message(harmony: Harmony, message: HarmonyMessage) -> list[int]:
    if message.role == "assistant":
        sampled = ParsedMessage(
            channel=message.channel or "final",
            recipient=message.recipient,
            content_type=message.content_type,
            text=message.content,
        )
        return harmony.assistant_header + harmony.render_sampled(sampled, message.end)

    if message.role == "user":
        observation = harmony.render_observation([], message.content)
    else:
        output = ToolOutput(message.role, message.channel or "", message.content)
        observation = harmony.render_observation([output])

    # The observation includes the header of the assistant's next message.
    return observation[: len(observation) - len(harmony.assistant_header)]
