"""One trainer rank: the driver's operations on policy, reference and critic.

TrainerWorker is a plain class. Each actor of ``trainer.ray_ranks`` creates one in its process.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from converters.gathering import WeightGathering
from converters.mxfp4_tensors import Digests
from megatron_gptoss import distributed
from megatron_gptoss.config.precision import torch_dtype
from megatron_gptoss.critic import ValueTrainer, make_critic
from megatron_gptoss.determinism import select_deterministic_algorithms
from megatron_gptoss.gpu_memory import phase_memory, release_cached_memory
from megatron_gptoss.layers.adapters import copy_factors, replaced_factors, without_adapters
from megatron_gptoss.layers.attention import slow_reasons
from megatron_gptoss.model import freeze
from megatron_gptoss.out_of_memory import out_of_memory_explained
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.planning.memory import predict_stage_memory
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.scorer import LogProbScorer, alignment, gather_parameters
from megatron_gptoss.step_results import LossFunction, StepStatistics
from megatron_gptoss.trainer import PolicyTrainer
from megatron_gptoss.weights import lost_by_merging
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.objectives import (
    distillation_objective,
    policy_objective,
    sft_objective,
    value_objective,
)
from rl_loop.cluster.group_authentication import authenticate_groups
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.data.rollout_batch import RlUpdates
from rl_loop.data.tensor_bytes import TensorBytes
from rl_loop.process_memory import exempt_from_collection
from rl_loop.trainer.gathered_export import export_weights
from rl_loop.trainer.initial_model import build_initial_model
from rl_loop.trainer.memory_metrics import max_over_ranks, memory_metrics
from rl_loop.trainer.rank_inputs import RankInputs
from rl_loop.trainer.rank_state import RankPosition, ResumedState
from rl_loop.trainer.run_checkpoints import RunCheckpoints
from rl_loop.trainer.step_plan import RankMiniBatch
from rl_loop.trainer.teachers import Teachers
from rl_loop.trainer.token_results import take_tokens
from rl_loop.trainer.weight_export import WeightExport
from rl_loop.weight_sync.gather import send_gathered
from rl_loop.weight_sync.source import WeightSender


class TrainerWorker:
    """One rank of the trainer.

    Every method is collective: the driver calls it on all ranks, with the same arguments on the
    ranks of a data-parallel rank.
    """

    def __init__(
        self,
        settings: TrainerConfig,
        rank: int,
        master: str,
        port: int,
        threads: int,
        store_file: Path | None = None,
    ) -> None:
        """Join the other ranks and build the model.

        Args:
            settings: settings of all ranks.
            rank: index of this rank.
            master: address of rank 0, where the ranks meet.
            port: free port there.
            threads: threads of torch in this process.
            store_file: file through which ranks on one machine meet instead.
        """
        torch.set_num_threads(threads)
        select_deterministic_algorithms(settings.training.deterministic)
        self.settings = settings
        self.algorithm = settings.objective
        # Groups authenticate when they are created, so this precedes the first one.
        authenticate_groups()
        distributed.initialize(settings.parallel, rank, master, port, store_file)
        # Before the model is built, so that its memory is counted.
        self.memory = phase_memory()
        self.memory.enter("start")

        self.model = build_initial_model(settings, settings.quantization)
        freeze(self.model, settings.ablation.freeze)
        self.trainer = PolicyTrainer(self.model, settings.optimizer)
        self.trainer.memory = self.memory
        if self.algorithm.routing_replay != "none":
            self.trainer.replay = RoutingReplay(self.model)

        # With adapters, the reference policy needs no second model. It is the policy without
        # adapters, or with their initial factors if the run starts from adapters.
        self.reference: LogProbScorer | None = None
        self._reference_factors: list[torch.Tensor] | None = None
        if self.algorithm.kl and settings.adapter is None:
            self.reference = LogProbScorer(build_initial_model(settings, settings.quantization))
        elif self.algorithm.kl and settings.initial_adapter is not None:
            self._reference_factors = copy_factors(self.model)
        self.teachers = Teachers(settings)
        self.critic: ValueTrainer | None = None
        if self.algorithm.critic:
            # Values are not sampled, so a critic's trained weights stay as they are.
            # With adapters, the critic's base is frozen like the policy's and can have the same
            # format.
            base_format = None if settings.adapter is None else settings.quantization
            self.critic = ValueTrainer(
                make_critic(build_initial_model(settings, base_format)),
                self.algorithm.critic.optimizer(settings.optimizer),
            )
            self.critic.memory = self.memory

        # Created before engines start, because NCCL allocates its buffers here.
        self._gathering = WeightGathering(self.model, settings.model)
        self._checkpoints = RunCheckpoints(settings, self.trainer, self.critic)

        # Megatron's buffers hold the weights. The memory of the original weights is free, and
        # servers that start on this GPU need it.
        release_cached_memory()
        self.memory.enter("between_phases")

    def enter_phase(self, phase: str) -> None:
        """Count memory towards ``phase`` from now on. For phases that begin outside of this class.

        Before the first update, when the optimizer has no state, "sync" and "scoring" count as
        "first_sync" and "first_scoring". Phases only measure memory. They change no computation.
        """
        if phase in ("sync", "scoring") and not self.trainer.updated:
            phase = f"first_{phase}"
        self.memory.enter(phase)

    def change_algorithm(self, algorithm: AlgorithmConfig) -> None:
        """Use other settings from the next step on. The set of models does not change."""
        self.algorithm = algorithm

    def _free_memory_for_engines(self) -> None:
        """Release the cache of torch's allocator if engines share this GPU."""
        if self.settings.memory_inputs.engine is not None:
            release_cached_memory()
            self.memory.split()

    def _memory_metrics(self) -> dict[str, float]:
        """Return the memory of the fullest GPU in each phase since the last call. Collective.

        Empty on CPUs.
        """
        measured = self.memory.take()
        if measured is None:
            return {}
        stage = parallel_state.get_pipeline_model_parallel_rank()
        predicted = predict_stage_memory(
            self.settings.memory_inputs, measured.gpu_total / 1e9, stage
        )
        device = next(self.model.parameters()).device
        return max_over_ranks(memory_metrics(measured.peaks, predicted), device)

    def position(self) -> RankPosition:
        """Return the data-parallel rank, the returned results and the slow layers of this rank."""
        # Per-token results of updates exist only on the last stage. Tensor- and context-parallel
        # ranks have the same results.
        answers = (
            parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
            and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        )
        return RankPosition(
            data=parallel_state.get_data_parallel_rank(),
            returns_results=answers,
            slow_attention=tuple(slow_reasons(self.model)),
        )

    # -- training ---------------------------------------------------------------------------------

    def sft_step(self, inputs: RankInputs, step: int) -> StepStatistics:
        """Take one optimizer step on demonstrations or conversations.

        Raises:
            ValueError: no token is in the loss.
        """
        (mini_batch,) = inputs.mini_batches
        (batches,) = inputs.pack(alignment())
        if mini_batch.is_empty:
            count = len(mini_batch.loss_tokens)
            raise ValueError(
                f"none of the {count} samples of the step has a token in the loss. Check the weights of "
                "messages (docs/data.md)"
            )
        # Normalized by the tokens of all ranks, not of this one.
        loss_tokens = int(mini_batch.loss_tokens.sum())
        loss = sft_objective(loss_tokens)
        if self.settings.distillation is not None:
            self.teachers.add_columns([batches], inputs, self.settings.distillation.top_k)
            loss = distillation_objective(loss_tokens)
        return self._update(self.trainer, batches, loss, step)

    def compute_estimates(self, inputs: RankInputs) -> dict[str, np.ndarray]:
        """Compute ``AlgorithmConfig.estimates`` of this rank's sequences, float32 [tokens] each."""
        columns = {}
        if self.critic is not None:
            columns["values"] = self._score_with(self.critic, inputs)
        if self.algorithm.kl:
            columns["reference_log_probs"] = self._reference_log_probs(inputs)
        if self.algorithm.compares_sampled_tokens:
            columns["teacher_log_probs"] = self.teachers.log_probs(inputs)
        return columns

    def _reference_log_probs(self, inputs: RankInputs) -> np.ndarray:
        """Compute the log-probs of the run's initial policy, as ``score`` does for the policy."""
        if self.reference is not None:
            return self._score_with(self.reference, inputs)

        with self._reference_adapters():
            log_probs = self._score_with(self.trainer, inputs)
        if self.trainer.replay is not None:
            self.trainer.replay.agreement()  # Drop these counts, because metrics are of the policy.
        return log_probs

    def _reference_adapters(self) -> AbstractContextManager[None]:
        """Let the policy be the reference policy in the block."""
        if self._reference_factors is None:
            return without_adapters(self.model)
        # The distributed optimizer would otherwise overwrite the reference's factors with the
        # policy's.
        gather_parameters(self.trainer.model)
        return replaced_factors(self.model, self._reference_factors)

    def rl_step(self, inputs: RankInputs, step: int) -> RlUpdates:
        """Take an optimizer step with critic and policy for every mini-batch of a step.

        The losses are ``policy_objective`` and ``value_objective`` of ``rl_loop.algorithms``. They
        compute the importance ratio, its clipping and the rollout correction.
        """
        packed = inputs.pack(alignment())
        # Every episode of a mini-batch may be excluded.
        mini_batches = [
            (mini_batch, batches)
            for mini_batch, batches in zip(inputs.mini_batches, packed, strict=True)
            if not mini_batch.is_empty
        ]
        updates = RlUpdates(skipped=self.algorithm.mini_batches - len(mini_batches))

        # Before the first update, so that all mini-batches are compared with the same weights.
        all_batches = [batch for _, batches in mini_batches for batch in batches]
        self._add_old_log_probs(all_batches)
        if self.algorithm.divergence is not None and all_batches:
            self.teachers.add_columns(packed, inputs, self.algorithm.divergence.top_k)
        # A critic without training would give the policy arbitrary advantages.
        critic_only_steps = self.algorithm.critic.warmup_steps if self.algorithm.critic else 0
        for mini_batch, batches in mini_batches:
            if self.critic is not None:
                updates.critic.append(self._update_critic(mini_batch, batches, step))
            if step >= critic_only_steps:
                updates.policy.append(
                    self._update_policy(mini_batch, batches, step, critic_only_steps)
                )
        self._free_memory_for_engines()
        updates.tokens = take_tokens(updates.policy, packed, inputs)
        return updates

    def _add_old_log_probs(self, batches: Sequence[PackedBatch]) -> None:
        """Fill the old log-probs, the denominator of the importance ratio, by ``old_log_probs``.

        - "rollout": the engine's log-probs.
        - "forward": log-probs of a forward pass with the weights before the first update. With
          routing replay "R2" it also records the routes.
        - "detach": none. The loss takes its own detached log-probs, so that the ratio is exactly 1.
        """
        source = self.algorithm.old_log_probs_from
        if source == "rollout":
            for batch in batches:
                batch.old_log_probs = batch.rollout_log_probs
        if source != "forward" or not batches:
            return

        replay = self.trainer.replay
        records_routes = self.algorithm.routing_replay == "R2"
        if replay is not None and records_routes:
            replay.start_recording()

        # The updates take the same micro-batches, so the results stay on this rank.
        for batch, log_probs in zip(
            batches, self._score_batches(self.trainer, batches), strict=True
        ):
            # Padding has no label, so its values are arbitrary. 0 keeps them finite.
            is_padding = batch.sample_ids < 0
            batch.old_log_probs = log_probs.cpu().float().masked_fill(is_padding, 0.0)
        if replay is not None and records_routes:
            for batch, routes in zip(batches, replay.recorded(), strict=True):
                batch.recorded_routes = routes

        if replay is not None:
            replay.agreement()  # Reset the counts, because metrics are of the updates.

    def _update_critic(
        self, mini_batch: RankMiniBatch, batches: Sequence[PackedBatch], step: int
    ) -> StepStatistics:
        """Take an optimizer step of the critic."""
        # The routes belong to the policy. The critic chooses its own experts, and has no teacher.
        not_critics: dict[str, Any] = dict.fromkeys(
            ("routed_experts", "recorded_routes", "teacher_top_ids", "teacher_top_log_probs")
        )
        batches = [replace(batch, **not_critics) for batch in batches]
        objective = value_objective(
            self.algorithm,
            torch.from_numpy(mini_batch.loss_tokens),
            self.settings.longest_episode,
            parallel_state.get_context_parallel_group(),
            episodes=_tensor(mini_batch.episodes),
        )
        assert self.critic is not None
        return self._update(self.critic, batches, objective, step)

    def _update_policy(
        self, mini_batch: RankMiniBatch, batches: Sequence[PackedBatch], step: int, first_step: int
    ) -> StepStatistics:
        """Take an optimizer step of the policy, whose schedule begins with step ``first_step``."""
        objective = policy_objective(
            self.algorithm,
            torch.from_numpy(mini_batch.loss_tokens),
            self.settings.longest_episode,
            parallel_state.get_context_parallel_group(),
            episodes=_tensor(mini_batch.episodes),
        )
        return self._update(self.trainer, batches, objective, step, first_step)

    def _update(
        self,
        trainer: PolicyTrainer,
        batches: Sequence[PackedBatch],
        loss: LossFunction,
        step: int,
        first_step: int = 0,
    ) -> StepStatistics:
        """Take one optimizer step.

        Args:
            trainer: trainer of policy or critic.
            batches: micro-batches of this rank.
            loss: loss function of the step.
            step: step of the run.
            first_step: step at which the learning-rate schedule of ``trainer`` begins.
        """
        # All ranks are synchronized here, so a checkpoint that is written by now can be published.
        self._checkpoints.publish_if_complete()

        # The policy's schedule begins after the warm-up of the critic.
        schedule_steps = self.settings.training.steps - first_step
        learning_rate = trainer.config.learning_rate_at(step - first_step, schedule_steps)
        with out_of_memory_explained(self.settings.memory_inputs):
            statistics = trainer.train_step(
                batches,
                loss,
                learning_rate,
                self.settings.training_temperature,
                self.settings.load_balancing,
            )
        # After the first update, when the optimizer's state exists. Later calls do nothing.
        exempt_from_collection()

        # The policy's figures include the memory of the critic's steps.
        if trainer is self.trainer:
            statistics.memory = self._memory_metrics()
        return statistics

    # -- scores -----------------------------------------------------------------------------------

    def score(self, inputs: RankInputs, temperature: float | None = None) -> np.ndarray:
        """Return the log-prob of each token in this rank's sequences, in nats: float32 [tokens].

        The first token of each sequence has 0.
        """
        self.memory.observe()  # Servers run while a canary is scored.
        return self._score_with(self.trainer, inputs, temperature)

    def teacher_score(self, inputs: RankInputs) -> np.ndarray:
        """Return the log-probs of the teacher, as ``score`` does for the policy."""
        return self.teachers.log_probs(inputs)

    def greedy_tokens(self, inputs: RankInputs) -> np.ndarray:
        """Return the greedy token at each position of this rank's sequences: int64 [tokens].

        The first token of each sequence has 0.
        """
        batches = _micro_batches(inputs)
        return inputs.to_column(self.trainer.greedy_tokens(batches), np.dtype(np.int64))

    def route_agreement(self) -> dict[str, float]:
        """Return ``RoutingReplay.agreement`` of the routes since the last update or call."""
        assert self.trainer.replay is not None
        return self.trainer.replay.agreement()

    def _score_with(
        self, scorer: LogProbScorer, inputs: RankInputs, temperature: float | None = None
    ) -> np.ndarray:
        values = self._score_batches(scorer, _micro_batches(inputs), temperature)
        return inputs.to_column(values, np.dtype(np.float32))

    def _score_batches(
        self,
        scorer: LogProbScorer,
        batches: Sequence[PackedBatch],
        temperature: float | None = None,
    ) -> list[torch.Tensor]:
        with out_of_memory_explained(self.settings.memory_inputs):
            return scorer.score(batches, temperature or self.settings.training_temperature)

    # -- weights and checkpoints ------------------------------------------------------------------

    def weights(self) -> TensorBytes | None:
        """Return all weights by Hugging Face name on rank 0, None elsewhere."""
        # The distributed optimizer leaves each rank with its share of the new weights.
        gather_parameters(self.trainer.model)
        # Gathering is collective, so every rank iterates over it, although only rank 0 returns it.
        tensors = dict(self._gathering.begin())
        return TensorBytes.of(tensors) if dist.get_rank() == 0 else None

    def mxfp4_weights(self) -> TensorBytes | None:
        """Return all weights like ``weights``, but quantized experts as blocks and scales."""
        gather_parameters(self.trainer.model)
        tensors = dict(self._gathering.begin(mxfp4_experts=True))
        return TensorBytes.of(tensors) if dist.get_rank() == 0 else None

    def mxfp4_digests(self) -> Digests:
        """Return digests of all quantized experts, as the ranks hold them."""
        gather_parameters(self.trainer.model)
        return self._gathering.mxfp4_digests()

    def lost_by_merging(self) -> float:
        """Return the share of unmerged expert updates that an export with merged weights loses."""
        gather_parameters(self.trainer.model)
        return lost_by_merging(self.model)

    def export(self, export: WeightExport) -> None:
        """Gather all weights, one tensor at a time, and write a Hugging Face directory on rank 0.

        Raises:
            ConversionError: ``export_weights`` failed.
            GatheringAbortedError: a rank has too little memory for its part.
        """
        gather_parameters(self.trainer.model)
        export_weights(self._gathering, export)

    def release_memory(self) -> None:
        """Release the cache of torch's allocator, before servers on this GPU resume."""
        release_cached_memory()

    def send_weights(self, sender: WeightSender) -> None:
        """Gather all weights and send them with ``sender`` from each of its ranks.

        A rank that fails still exchanges the messages that the other ranks wait for, and raises
        afterwards. Therefore all ranks can try again.

        Raises:
            SyncError: on the ranks that failed.
            GatheringError: the ranks cannot exchange further messages.
        """
        self.enter_phase("sync")
        gather_parameters(self.trainer.model)
        try:
            failure = send_gathered(self._gathering, sender, torch_dtype(self.settings.dtype))
        finally:
            # Free the sent weights for the engines, for the next step, and for another attempt
            # after one that failed because a rank had too little memory.
            self.release_memory()
            self.memory.enter("rollout")
        if failure is not None:
            raise failure

    def save(self, step: int, state: dict[str, Any], block: bool) -> None:
        """Begin a checkpoint, and complete an earlier one.

        With ``block``, the checkpoint and its kept adapters are complete on return. Otherwise a
        later update completes it.

        Raises:
            CheckpointError: this or an earlier checkpoint cannot be written, or the kept adapters
                of one cannot be written. In the second case this checkpoint is complete.
        """
        self.memory.enter("checkpoint")
        # The weights are in host memory afterwards, so engines can have the GPU while files are
        # written.
        self._checkpoints.start(step, state)
        self._free_memory_for_engines()
        self.memory.enter("between_phases")
        self._checkpoints.finish(block)

    def resume(self) -> ResumedState | None:
        """Load the newest undamaged checkpoint of the run.

        Returns:
            The saved state, or None if no checkpoint was saved.

        Raises:
            CheckpointError: all checkpoints are damaged. The message names the files.
        """
        return self._checkpoints.resume()


def _micro_batches(inputs: RankInputs) -> list[PackedBatch]:
    """Build all micro-batches of this rank, in the order of the mini-batches."""
    return [batch for batches in inputs.pack(alignment()) for batch in batches]


def _tensor(array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)
