"""One trainer rank: everything that touches Megatron. A plain class; ``trainer_group`` makes Ray actors of it."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.objectives import policy_objective, sft_objective, value_objective
from rl_loop.config.run import RlConfig, RunConfig
from rl_loop.engines.backend import WeightSender
from rl_loop.tracking.run_directory import RunDirectory


@dataclass
class RlUpdates:
    """The optimizer steps of one training step; none of the policy while the critic warms up."""

    policy: list[StepStatistics] = field(default_factory=list)
    critic: list[StepStatistics] = field(default_factory=list)
    skipped: int = 0
    """Mini-batches without a token to learn from: nothing was changed."""


class TrainerWorker:
    """Every method is collective: the driver calls it on all ranks with the same arguments."""

    def __init__(self, config: RunConfig, rank: int, master: str, port: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.config = config
        distributed.initialize(config.parallel, rank, master, port)
        self.algorithm = config.algorithm if isinstance(config, RlConfig) else AlgorithmConfig()
        self.model = self._initial_model()
        freeze(self.model, config.ablation.freeze)
        self.trainer = PolicyTrainer(self.model, config.optimizer)
        if self.algorithm.routing_replay != "none":
            self.trainer.replay = RoutingReplay(self.model)
        self.reference = Scorer(self._initial_model()) if self.algorithm.kl else None
        self.critic: ValueTrainer | None = None
        if self.algorithm.critic:
            self.critic = ValueTrainer(make_critic(self._initial_model()), self.algorithm.critic.optimizer)
        self.run, keep = RunDirectory(config.directory), config.training.keep_checkpoints
        self._saved: list[tuple[CheckpointWriter, PolicyTrainer]] = []
        if self.critic:  # one more than of the policy, which is written last and decides what is the latest
            self._saved.append((CheckpointWriter(self.run.critic_checkpoints, keep + 1), self.critic))
        self._saved.append((CheckpointWriter(self.run.checkpoints, keep), self.trainer))

    def _initial_model(self) -> torch.nn.Module:
        """This rank's part of the model that the run starts from."""
        config, ablation = self.config, self.config.ablation
        model = build_model(
            config.model,
            config.parallel,
            getattr(torch, config.dtype),
            router_noise=ablation.router_noise,
            sinks=ablation.trainer_sinks,
            sink_gradient=ablation.sink_gradient,
            sink_backward=ablation.sink_backward,
        )
        source = config.initial_weights
        if source is None:
            load_hf_weights(model, config.model, random_hf_weights(config.model, config.seed))
        elif (source / "config.json").exists():
            load_hf_weights(model, config.model, HfDirectory(source).view)
        else:
            load_model_weights(latest_checkpoint(source / "checkpoints") or source, model)
        return model

    # -- training -----------------------------------------------------------------------------------------------------

    def sft_step(self, samples: list[Sample], step: int) -> StepStatistics:
        """One optimizer step on demonstrations. Raises ValueError if they have no token to learn from."""
        if not (tokens := _loss_tokens(samples)):
            raise ValueError(f"none of the {len(samples)} samples has a token to learn from")
        return self._update(self.trainer, samples, sft_objective(tokens), step)

    def estimates(self, samples: list[Sample]) -> dict[str, list[list[float]]]:
        """Per-token columns that advantages need, by the name of their field of Sample: the critic's values and the
        reference policy's log-probs, as far as the algorithm has a use for them."""
        scorers = {"values": self.critic, "reference_log_probs": self.reference}
        return {name: self._scored(scorer, samples) for name, scorer in scorers.items() if scorer is not None}

    def rl_step(self, samples: list[Sample], algorithm: AlgorithmConfig, step: int) -> RlUpdates:
        """``algorithm.mini_batches`` optimizer steps on one batch of episodes, of the critic and of the policy.

        Old log-probs are computed, in a second forward pass, only where the algorithm needs them."""
        replay = self.trainer.replay
        if algorithm.old_log_probs_from == "forward":
            if replay is not None and algorithm.routing_replay == "R2":
                replay.start_recording()
            old = self.score(samples)
            samples = [replace(sample, old_log_probs=old[i]) for i, sample in enumerate(samples)]
            if replay is not None and algorithm.routing_replay == "R2":
                routes = self._recorded_routes(replay, samples)
                samples = [replace(sample, routed_experts=routes[i]) for i, sample in enumerate(samples)]
            if replay is not None:
                replay.agreement()  # of the updates only
        elif algorithm.old_log_probs_from == "rollout":
            samples = [replace(sample, old_log_probs=sample.rollout_log_probs) for sample in samples]
        updates = RlUpdates()
        critic, limit = algorithm.critic, self.config.rollout.max_tokens
        context = parallel_state.get_context_parallel_group()
        for part in range(algorithm.mini_batches):
            mini_batch = samples[part :: algorithm.mini_batches]
            if not _loss_tokens(mini_batch):  # every episode may be masked, and there is no mean over no tokens
                updates.skipped += 1
                continue
            if self.critic is not None:
                plain = [replace(sample, routed_experts=None) for sample in mini_batch]
                objective = value_objective(algorithm, mini_batch, limit, context)
                updates.critic.append(self._update(self.critic, plain, objective, step))
            first_step = critic.warmup_steps if critic is not None else 0
            if step >= first_step:
                objective = policy_objective(algorithm, mini_batch, limit, context)
                updates.policy.append(self._update(self.trainer, mini_batch, objective, step, first_step))
        return updates

    def _update(
        self, trainer: PolicyTrainer, samples: list[Sample], loss: LossFunction, step: int, first_step: int = 0
    ) -> StepStatistics:
        """One optimizer step. ``first_step``: where the learning-rate schedule of ``trainer`` begins."""
        for writer, _ in self._saved:
            writer.finish(block=False)
        rate = trainer.config.learning_rate_at(step - first_step, self.config.training.steps - first_step)
        with out_of_memory_explained(self.config.memory_inputs):
            statistics = trainer.train_step(self._batches(samples), loss, rate, self.config.rollout.temperature)
        exempt_from_collection()
        return statistics

    def _recorded_routes(self, replay: RoutingReplay, samples: list[Sample]) -> list[np.ndarray]:
        """Per sample int16 [len - 1, layers, top_k]: what the routers chose in the forward pass over ``samples``."""
        batches = self._batches(samples)
        routes = replay.recorded()
        for i, batch in enumerate(batches):
            if (size := parallel_state.get_context_parallel_world_size()) > 1:
                routes[i] = routes[i][batch.context_layout_over(size).inverse.to(routes[i].device)]
        shape = routes[0].shape[1:]
        rows = self._in_order([r.flatten(1) for r in routes], batches, len(samples))
        return [np.array(row[1:], dtype=np.int16).reshape(-1, *shape) for row in rows]

    def _batches(self, samples: list[Sample]) -> Sequence[PackedBatch]:
        parallel, limit = self.config.parallel, self.config.training.max_tokens_per_micro_batch
        multiple = parallel.micro_batch_multiple
        return data_parallel_slice(pack(samples, limit, parallel.data, alignment(), self._work, multiple))

    def _work(self, length: int) -> float:
        return forward_flops(self.config.model, [length])

    def score(self, samples: list[Sample], temperature: float | None = None) -> list[list[float]]:
        """Per sample the log-prob of each of its tokens, 0.0 for the first; in the order of ``samples``."""
        return self._scored(self.trainer, samples, temperature)

    def route_agreement(self) -> dict[str, float]:
        """``RoutingReplay.agreement``: of all routes replayed since the last update or call."""
        assert self.trainer.replay is not None
        return self.trainer.replay.agreement()

    def _scored(self, scorer: Scorer, samples: list[Sample], temperature: float | None = None) -> list[list[float]]:
        batches = self._batches(samples)
        with out_of_memory_explained(self.config.memory_inputs):
            values = scorer.score(batches, temperature or self.config.rollout.temperature)
        return self._in_order(values, batches, len(samples))

    def greedy_tokens(self, samples: list[Sample]) -> list[list[int]]:
        """Per sample the token that greedy decoding would have put in each place, 0 for the first."""
        batches = self._batches(samples)
        chosen = self._in_order(self.trainer.greedy_tokens(batches), batches, len(samples))
        return [[int(token) for token in row] for row in chosen]

    @staticmethod
    def _in_order(values: list[torch.Tensor], batches: Sequence[PackedBatch], count: int) -> list[list[float]]:
        own: dict[int, list[float]] = {}
        for row, batch in zip(values, batches, strict=True):
            own |= unpack(row, batch)
        everyone: list[dict[int, list[float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, own)
        merged = {sample_id: row for part in everyone for sample_id, row in part.items()}
        return [merged[i] for i in range(count)]

    # -- weights and checkpoints --------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor] | None:
        """All weights by Hugging Face name on rank 0, None elsewhere."""
        gather_parameters(self.trainer.model)
        named = {name: tensor.detach().clone() for name, tensor in export_hf_weights(self.model, self.config.model)}
        return named if dist.get_rank() == 0 else None

    def send_weights(self, sender: WeightSender) -> None:
        """Let ``sender`` send all weights from rank 0, which gets the other ranks' parts from them. Raises what the
        sender raises, on rank 0."""
        dtype = getattr(torch, self.config.dtype)
        gather_parameters(self.trainer.model)
        exported = export_hf_weights(self.model, self.config.model, transposed=sender.transposed)
        stream = ((name, tensor.to(dtype)) for name, tensor in exported)
        try:
            if dist.get_rank() == 0:
                sender.send(stream)
        finally:
            for _ in stream:  # to its end, whatever happened: the other ranks are still sending
                pass

    def save(self, step: int, state: dict[str, Any], block: bool) -> None:
        """Begin a checkpoint; it is complete on return if ``block``, else at the beginning of a later update."""
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
    """What has lasted until now. Searching it for garbage takes up to half a second, on every rank at another time."""
    gc.collect()
    gc.freeze()


def _loss_tokens(samples: list[Sample]) -> int:
    return sum(sum(sample.loss_mask[1:]) for sample in samples)
