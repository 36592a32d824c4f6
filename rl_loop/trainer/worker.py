"""One trainer rank: everything that touches Megatron. A plain class, of which ``trainer.group``
makes Ray actors."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from converters.hf_directory import HfDirectory
from converters.live import export_hf_weights, load_hf_weights
from converters.random_weights import random_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.checkpoint.directory import find_checkpoint, latest_checkpoint
from megatron_gptoss.checkpoint.loader import load_checkpoint, load_model_weights
from megatron_gptoss.checkpoint.writer import CheckpointWriter
from megatron_gptoss.critic import ValueTrainer, make_critic
from megatron_gptoss.model import build_model, freeze
from megatron_gptoss.packing import PackedBatch, Sample, pack, unpack
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.planning.memory_advice import out_of_memory_explained
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.scorer import Scorer, alignment, data_parallel_slice, gather_parameters
from megatron_gptoss.trainer import LossFunction, PolicyTrainer, StepStatistics
from rl_loop.algorithms.objectives import policy_objective, sft_objective, value_objective
from rl_loop.data.rollout_batch import RlUpdates, TokenEstimates
from rl_loop.engines.backend import WeightSender
from rl_loop.tracking.run_directory import RunDirectory
from rl_loop.trainer.settings import TrainerSettings


class TrainerWorker:
    """Every method is collective: the driver calls it on all ranks with the same arguments."""

    def __init__(
        self, settings: TrainerSettings, rank: int, master: str, port: int, threads: int
    ) -> None:
        """``master``, ``port``: where rank 0 gathers the process group. ``threads``: of
        torch in this process."""
        torch.set_num_threads(threads)
        self.settings = settings
        self.algorithm = settings.algorithm
        distributed.initialize(settings.parallel, rank, master, port)

        self.model = self._initial_model()
        freeze(self.model, settings.ablation.freeze)
        self.trainer = PolicyTrainer(self.model, settings.optimizer)
        if self.algorithm.routing_replay != "none":
            self.trainer.replay = RoutingReplay(self.model)

        self.reference: Scorer | None = None
        if self.algorithm.kl:
            self.reference = Scorer(self._initial_model())
        self.critic: ValueTrainer | None = None
        if self.algorithm.critic:
            self.critic = ValueTrainer(
                make_critic(self._initial_model()), self.algorithm.critic.optimizer
            )

        self.run = RunDirectory(settings.directory)
        self._saved = self._checkpoint_writers()

    def _initial_model(self) -> torch.nn.Module:
        """Build this rank's part of the model that the run starts from."""
        settings = self.settings
        model = build_model(
            settings.model,
            settings.parallel,
            getattr(torch, settings.dtype),
            router_noise=settings.ablation.router_noise,
            sinks=settings.ablation.trainer_sinks,
            sink_gradient=settings.ablation.sink_gradient,
            sink_backward=settings.ablation.sink_backward,
        )
        source = settings.initial_weights
        if source is None:
            load_hf_weights(model, settings.model, random_hf_weights(settings.model, settings.seed))
        elif (source / "config.json").exists():
            load_hf_weights(model, settings.model, HfDirectory(source).view)
        else:
            load_model_weights(latest_checkpoint(source / "checkpoints") or source, model)
        return model

    def _checkpoint_writers(self) -> list[tuple[CheckpointWriter, PolicyTrainer]]:
        """Pair what is saved with its writer, in the order in which it is written."""
        keep = self.settings.training.keep_checkpoints
        writers: list[tuple[CheckpointWriter, PolicyTrainer]] = []
        if self.critic is not None:
            # One more than of the policy, which is written last and decides what is the latest.
            writers.append((CheckpointWriter(self.run.critic_checkpoints, keep + 1), self.critic))
        writers.append((CheckpointWriter(self.run.checkpoints, keep), self.trainer))
        return writers

    # -- training ---------------------------------------------------------------------------------

    def sft_step(self, samples: list[Sample], step: int) -> StepStatistics:
        """Take one optimizer step on demonstrations. Raises ValueError if they have
        no token to learn from."""
        tokens = _loss_tokens(samples)
        if tokens == 0:
            raise ValueError(f"none of the {len(samples)} samples has a token to learn from")
        return self._update(self.trainer, samples, sft_objective(tokens), step)

    def compute_values_and_reference_log_probs(self, samples: list[Sample]) -> TokenEstimates:
        """Compute what advantages need, as far as the algorithm has a use for it."""
        values = self._score_with(self.critic, samples) if self.critic is not None else None
        reference = (
            self._score_with(self.reference, samples) if self.reference is not None else None
        )
        return TokenEstimates(values=values, reference_log_probs=reference)

    def rl_step(self, samples: list[Sample], step: int) -> RlUpdates:
        """Take ``algorithm.mini_batches`` optimizer steps of the critic and of the policy on one
        batch of episodes."""
        # Before the first update, with the weights that the whole batch is compared with.
        samples = self._with_old_log_probs(samples)
        critic_only_steps = self.algorithm.critic.warmup_steps if self.algorithm.critic else 0

        updates = RlUpdates()
        for number in range(self.algorithm.mini_batches):
            # Every n-th sample, so that the samples of one task are spread over the mini-batches.
            mini_batch = samples[number :: self.algorithm.mini_batches]
            if _loss_tokens(mini_batch) == 0:
                # Every episode may be masked, and there is no mean over no tokens.
                updates.skipped += 1
                continue
            if self.critic is not None:
                updates.critic.append(self._update_critic(mini_batch, step))
            if step >= critic_only_steps:
                updates.policy.append(self._update_policy(mini_batch, step, critic_only_steps))
        return updates

    def _with_old_log_probs(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples with the denominators of their importance ratios, if the algorithm
        needs any.

        They cost a forward pass only with ``old_log_probs: forward``."""
        source = self.algorithm.old_log_probs_from
        if source == "rollout":
            return [replace(sample, old_log_probs=sample.rollout_log_probs) for sample in samples]
        if source != "forward":
            return samples

        replay = self.trainer.replay
        records_routes = replay is not None and self.algorithm.routing_replay == "R2"
        if replay is not None and records_routes:
            replay.start_recording()
        log_probs = self.score(samples)
        samples = [
            replace(sample, old_log_probs=row)
            for sample, row in zip(samples, log_probs, strict=True)
        ]
        if replay is not None and records_routes:
            routes = self._recorded_routes(replay, samples)
            samples = [
                replace(sample, routed_experts=row)
                for sample, row in zip(samples, routes, strict=True)
            ]

        if replay is not None:
            replay.agreement()  # start counting anew: what is reported is that of the updates
        return samples

    def _update_critic(self, mini_batch: list[Sample], step: int) -> StepStatistics:
        # The routes are the policy's; the critic chooses its own experts.
        samples = [replace(sample, routed_experts=None) for sample in mini_batch]
        context = parallel_state.get_context_parallel_group()
        objective = value_objective(
            self.algorithm, mini_batch, self.settings.max_episode_tokens, context
        )
        assert self.critic is not None
        return self._update(self.critic, samples, objective, step)

    def _update_policy(
        self, mini_batch: list[Sample], step: int, first_step: int
    ) -> StepStatistics:
        context = parallel_state.get_context_parallel_group()
        objective = policy_objective(
            self.algorithm, mini_batch, self.settings.max_episode_tokens, context
        )
        return self._update(self.trainer, mini_batch, objective, step, first_step)

    def _update(
        self,
        trainer: PolicyTrainer,
        samples: list[Sample],
        loss: LossFunction,
        step: int,
        first_step: int = 0,
    ) -> StepStatistics:
        """Take one optimizer step. ``first_step``: where the learning-rate schedule
        of ``trainer`` begins."""
        # A checkpoint that is being written must have left the weights before they change.
        for writer, _ in self._saved:
            writer.finish(block=False)

        schedule_steps = self.settings.training.steps - first_step
        learning_rate = trainer.config.learning_rate_at(step - first_step, schedule_steps)
        with out_of_memory_explained(self.settings.memory_inputs):
            statistics = trainer.train_step(
                self._pack(samples), loss, learning_rate, self.settings.temperature
            )
        exempt_from_collection()
        return statistics

    # -- scores -----------------------------------------------------------------------------------

    def score(self, samples: list[Sample], temperature: float | None = None) -> list[list[float]]:
        """Compute the log-prob of each token of each sample, in nats, 0.0 for the first token."""
        return self._score_with(self.trainer, samples, temperature)

    def greedy_tokens(self, samples: list[Sample]) -> list[list[int]]:
        """Compute, per sample, the token that greedy decoding would have put in each
        place, 0 for the first."""
        batches = self._pack(samples)
        rows = self._merge_ranks(self.trainer.greedy_tokens(batches), batches, len(samples))
        return [[int(token) for token in row] for row in rows]

    def route_agreement(self) -> dict[str, float]:
        """Return ``RoutingReplay.agreement`` of all routes replayed since
        the last update or call."""
        assert self.trainer.replay is not None
        return self.trainer.replay.agreement()

    def _score_with(
        self, scorer: Scorer, samples: list[Sample], temperature: float | None = None
    ) -> list[list[float]]:
        batches = self._pack(samples)
        with out_of_memory_explained(self.settings.memory_inputs):
            rows = scorer.score(batches, temperature or self.settings.temperature)
        return self._merge_ranks(rows, batches, len(samples))

    def _recorded_routes(self, replay: RoutingReplay, samples: list[Sample]) -> list[np.ndarray]:
        """Return what the routers chose in the forward pass over ``samples``: per sample int16
        [len - 1, layers, top_k]."""
        batches = self._pack(samples)
        routes = replay.recorded()

        # With context parallelism, tokens lie in the order of the ranks; bring them back into that
        # of the row.
        ranks = parallel_state.get_context_parallel_world_size()
        if ranks > 1:
            for i, batch in enumerate(batches):
                order = batch.context_layout_over(ranks).inverse
                routes[i] = routes[i][order.to(routes[i].device)]

        shape = routes[0].shape[1:]  # layers, top_k
        rows = self._merge_ranks([route.flatten(1) for route in routes], batches, len(samples))
        return [np.array(row[1:], dtype=np.int16).reshape(-1, *shape) for row in rows]

    def _pack(self, samples: list[Sample]) -> Sequence[PackedBatch]:
        """Pack the samples into micro-batches and return those of this data-parallel rank."""
        settings = self.settings
        batches = pack(
            samples,
            settings.training.max_tokens_per_micro_batch,
            settings.parallel.data,
            alignment(),
            lambda length: forward_flops(settings.model, [length]),
            settings.parallel.micro_batch_multiple,
        )
        return data_parallel_slice(batches)

    @staticmethod
    def _merge_ranks(
        values: list[torch.Tensor], batches: Sequence[PackedBatch], count: int
    ) -> list[list[float]]:
        """Gather per-token values of all ranks' micro-batches and return them by
        sample, 0 to ``count`` - 1."""
        local: dict[int, list[float]] = {}
        for row, batch in zip(values, batches, strict=True):
            local |= unpack(row, batch)

        by_rank: list[dict[int, list[float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, local)
        merged: dict[int, list[float]] = {}
        for rows in by_rank:
            merged |= rows
        return [merged[i] for i in range(count)]

    # -- weights and checkpoints ------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor] | None:
        """Return all weights by Hugging Face name on rank 0, None elsewhere."""
        # The distributed optimizer leaves each rank with its share of the new weights.
        gather_parameters(self.trainer.model)
        named = {
            name: tensor.detach().clone()
            for name, tensor in export_hf_weights(self.model, self.settings.model)
        }
        return named if dist.get_rank() == 0 else None

    def send_weights(self, sender: WeightSender) -> None:
        """Let ``sender`` send all weights from rank 0, which gets the other ranks' parts from
        them. Raises what the sender raises, on rank 0."""
        dtype = getattr(torch, self.settings.dtype)
        gather_parameters(self.trainer.model)
        exported = export_hf_weights(self.model, self.settings.model, transposed=sender.transposed)
        stream = ((name, tensor.to(dtype)) for name, tensor in exported)
        try:
            if dist.get_rank() == 0:
                sender.send(stream)
        finally:
            # To its end, whatever happened: the other ranks are still sending.
            for _ in stream:
                pass

    def save(self, step: int, state: dict[str, Any], block: bool) -> None:
        """Begin a checkpoint; it is complete on return if ``block``, else at the
        beginning of a later update."""
        for writer, trainer in self._saved:
            writer.start(trainer, step, state)
        if block:
            for writer, _ in self._saved:
                writer.finish()

    def resume(self) -> dict[str, Any] | None:
        """Load the newest checkpoint of the run; None if there is none."""
        path = latest_checkpoint(self.run.checkpoints)
        if path is None:
            return None
        if self.critic is not None:
            root = self.run.critic_checkpoints
            load_checkpoint(find_checkpoint(root, path.name) or root / path.name, self.critic)
        return load_checkpoint(path, self.trainer)


@cache
def exempt_from_collection() -> None:
    """Freeze long-lived objects so that the collector skips them.

    Searching them for garbage takes up to half a second, on every rank at another time."""
    gc.collect()
    gc.freeze()


def _loss_tokens(samples: list[Sample]) -> int:
    """Count the tokens that the loss looks at; the first of a sample has no log-prob."""
    return sum(sum(sample.loss_mask[1:]) for sample in samples)
