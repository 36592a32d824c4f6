"""All ranks of the trainer as one object, which distributes samples and gathers results."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from converters.model_extras import ModelExtras
from converters.mxfp4_tensors import Digests
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import StepStatistics
from megatron_gptoss.token_columns import INPUT_COLUMNS, TOKEN_COLUMNS
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.data.rollout_batch import RlUpdates
from rl_loop.data.tensor_bytes import StoredTensors
from rl_loop.trainer.rank_inputs import SCORED_COLUMNS, RankInputStore
from rl_loop.trainer.rank_state import RankPosition, ResumedState
from rl_loop.trainer.step_plan import StepPlan, plan_step
from rl_loop.trainer.teacher_plan import plan_teachers
from rl_loop.trainer.token_results import gather_tokens
from rl_loop.trainer.weight_export import WeightExport
from rl_loop.weight_sync.source import WeightSender

logger = logging.getLogger(__name__)

FIXED_AT_START = ("critic", "kl", "distillation", "routing_replay")
"""Settings of the algorithm that a trainer's ranks are built with."""


class TrainerRanks(Protocol):
    """Processes in which TrainerWorkers run: RayRanks."""

    def ready(self) -> list[RankPosition]: ...

    def store(self, value: Any) -> Any: ...

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], result_ranks: Sequence[int]
    ) -> list[Any]: ...

    def call_and_store(self, method: str) -> Callable[[], Any]: ...

    def close(self) -> None: ...


class TrainerGroup:
    """All ranks of the trainer.

    They run the same method at the same time, each data-parallel rank on different sequences.
    """

    def __init__(self, settings: TrainerConfig, ranks: TrainerRanks) -> None:
        """Build the group over ``ranks`` that are starting. ``ready`` waits for them."""
        self.ranks = ranks
        self._settings = settings
        self._objective = settings.objective
        self._inputs = RankInputStore(ranks.store)
        self._last_plan: StepPlan | None = None
        self._positions: list[RankPosition] = []
        self._result_ranks: list[int] = []

    def ready(self) -> None:
        """Wait until every rank has its weights. Raises the error of a rank."""
        self._positions = self.ranks.ready()

        # Ranks log to files of Ray, where nobody would see that a package is missing.
        for reason in sorted({r for position in self._positions for r in position.slow_attention}):
            logger.warning("trainer: %s", reason)

        # Data-parallel rank -> rank that returns the results of its sequences.
        answering = {
            position.data: rank
            for rank, position in enumerate(self._positions)
            if position.returns_results
        }
        self._result_ranks = [answering[data] for data in range(self._settings.parallel.data)]

    def close(self) -> None:
        self.ranks.close()

    # -- calls with the same arguments on all ranks -----------------------------------------------

    def route_agreement(self) -> dict[str, float]:
        return self._all("route_agreement")

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return all weights by Hugging Face name, in the shapes of their names."""
        return StoredTensors(self.ranks.call_and_store("weights"))

    def mxfp4_weights(self) -> Mapping[str, torch.Tensor]:
        """Return all weights like ``weights``, but quantized experts as blocks and scales.

        Blocks: uint8 [experts, rows, inputs / 32, 16]. Scales: uint8 [experts, rows, inputs / 32].
        """
        return StoredTensors(self.ranks.call_and_store("mxfp4_weights"))

    def mxfp4_digests(self) -> Digests:
        return self._all("mxfp4_digests")

    def lost_by_merging(self) -> float:
        """Return the share of unmerged expert updates that an export with merged weights loses."""
        share: float = self._all("lost_by_merging")
        return share

    def export(self, export: WeightExport) -> None:
        """Write all weights to a Hugging Face directory, from rank 0."""
        # Without this, Ray's store would hold a tokenizer of 28 MB for every rank.
        gathered_only = replace(export, extras=ModelExtras(), mxfp4_digests={})
        others = self._settings.parallel.world_size - 1
        arguments = [(export,), *[(gathered_only,)] * others]
        self.ranks.call("export", arguments, result_ranks=[0])

    def release_memory(self) -> None:
        self._all("release_memory")

    def send_weights(self, sender: WeightSender) -> None:
        world = self._settings.parallel.world_size
        # Before the call: a rank that does not exist would never send, and its engine would wait.
        if max(sender.ranks) >= world:
            raise ValueError(
                f"trainer rank {max(sender.ranks)} must send weights to an engine on its GPU, but "
                f"parallel.world_size is {world}. Use one trainer rank per GPU of the engines"
            )
        self._all("send_weights", sender)

    def enter_phase(self, phase: str) -> None:
        self._all("enter_phase", phase)

    def change_algorithm(self, algorithm: AlgorithmConfig) -> None:
        """Use other settings of the algorithm from the next step on.

        Raises:
            ValueError: a setting decides which models are built, or how.
        """
        # Ranks build their models and buffers by these settings, and only once.
        for name in FIXED_AT_START:
            before = getattr(self._objective, name)
            after = getattr(algorithm, name)
            if before != after:
                raise ValueError(
                    f"algorithm.{name} cannot change while the trainer runs (from {before!r} to "
                    f"{after!r})"
                )
        self._all("change_algorithm", algorithm)
        self._objective = algorithm

    def save(self, step: int, state: dict[str, Any], block: bool) -> None:
        self._all("save", step, state, block)

    def resume(self) -> ResumedState | None:
        return self._all("resume")

    def _all(self, method: str, *arguments: Any) -> Any:
        """Call a method on every rank, and return the result of rank 0."""
        everyone = [arguments] * self._settings.parallel.world_size
        return self.ranks.call(method, everyone, result_ranks=[0])[0]

    # -- calls with the sequences of each data-parallel rank --------------------------------------

    def sft_step(self, samples: TrainingSamples, step: int) -> StepStatistics:
        """Take one optimizer step on demonstrations."""
        plan = self._plan(samples)
        inputs = self._inputs.store(samples, plan)
        statistics: StepStatistics = self._on_ranks("sft_step", inputs, [0], step)[0]
        statistics.shared_tokens = plan.shared_tokens
        # Demonstrations are read in one pass, so no later pass needs the stored columns.
        self._inputs.release()
        return statistics

    def compute_estimates(self, samples: TrainingSamples) -> dict[str, np.ndarray]:
        """Compute the columns ``AlgorithmConfig.estimates``, float32 [tokens] each."""
        plan = self._plan(samples)
        teachers = None
        if self._objective.compares_sampled_tokens:
            teachers = plan_teachers(samples, plan, self._settings)
        inputs = self._inputs.store(samples, plan, self._estimated_from, teachers)
        results: list[dict[str, np.ndarray]] = self._on_ranks(
            "compute_estimates", inputs, self._result_ranks
        )
        # All ranks return the same columns.
        return {
            name: plan.gather_results(
                samples, [result[name] for result in results], name, TOKEN_COLUMNS[name].dtype
            )
            for name in results[0]
        }

    @property
    def _estimated_from(self) -> Sequence[str]:
        """Columns that critic, reference policy and teacher read."""
        algorithm = self._objective
        is_own_base = self._settings.adapter is not None and algorithm.kl is not None
        if is_own_base and algorithm.routing_replay == "R3":
            # A policy without its adapters replays the routes of the policy with them, so both have
            # the same log-probs until the first update. Other models choose their own experts.
            return SCORED_COLUMNS
        return INPUT_COLUMNS

    def rl_step(self, samples: TrainingSamples, step: int) -> RlUpdates:
        """Take ``algorithm.mini_batches`` optimizer steps with critic and policy."""
        plan = self._plan(samples, self._objective.mini_batches)
        teachers = None
        if self._objective.divergence is not None:
            teachers = plan_teachers(samples, plan, self._settings)
        inputs = self._inputs.store(samples, plan, teachers=teachers)
        # Rank 0 returns the statistics, even if it is not on the last pipeline stage.
        result_ranks = sorted({0, *self._result_ranks})
        results = self._on_ranks("rl_step", inputs, result_ranks, step)
        # An update is the last pass over its samples.
        self._inputs.release()

        # Statistics are the same on every rank. Per-token results cover the rank's own sequences.
        updates: RlUpdates = results[0]
        updates.shared_tokens = plan.shared_tokens
        by_rank = dict(zip(result_ranks, results, strict=True))
        tokens = [by_rank[rank].tokens for rank in self._result_ranks]
        updates.tokens = gather_tokens(samples, plan, tokens)
        return updates

    def score(self, samples: TrainingSamples, temperature: float | None = None) -> np.ndarray:
        """Compute log-probs in nats: float32 [tokens], 0 for the first token of a sequence."""
        plan = self._plan(samples)
        inputs = self._inputs.store(samples, plan, SCORED_COLUMNS)
        results = self._on_ranks("score", inputs, self._result_ranks, temperature)
        return plan.gather_results(samples, results, "log_probs", np.dtype(np.float32))

    def teacher_score(self, samples: TrainingSamples) -> np.ndarray | None:
        """Compute the log-probs of the teacher, as ``score`` does. None without a teacher."""
        if not self._settings.teachers:
            return None
        plan = self._plan(samples)
        inputs = self._inputs.store(samples, plan, SCORED_COLUMNS)
        results = self._on_ranks("teacher_score", inputs, self._result_ranks)
        return plan.gather_results(samples, results, "log_probs", np.dtype(np.float32))

    def greedy_tokens(self, samples: TrainingSamples) -> np.ndarray:
        """Return the greedy token at each position: int64 [tokens].

        The first token of a sequence has 0.
        """
        plan = self._plan(samples)
        inputs = self._inputs.store(samples, plan, SCORED_COLUMNS)
        results = self._on_ranks("greedy_tokens", inputs, self._result_ranks)
        return plan.gather_results(samples, results, "greedy_tokens", np.dtype(np.int64))

    def _plan(self, samples: TrainingSamples, mini_batches: int = 1) -> StepPlan:
        """Distribute the sequences over the ranks, once for all passes of a step."""
        # An update in several mini-batches has a separate plan. Other passes take all samples
        # together, because this needs fewer micro-batches and gives the same results.
        if self._last_plan is None or not self._last_plan.is_for(samples, mini_batches):
            self._last_plan = plan_step(samples, self._settings, mini_batches)
        return self._last_plan

    def _on_ranks(
        self, method: str, inputs: Sequence[Any], result_ranks: Sequence[int], *arguments: Any
    ) -> list[Any]:
        """Call a method on every rank, and return the results of the ranks ``result_ranks``.

        Other results are not sent to the driver.

        Args:
            method: name of a TrainerWorker method.
            inputs: inputs of each data-parallel rank.
            result_ranks: ranks whose results are returned.
            arguments: further arguments, equal for all ranks.
        """
        if not self._positions:
            raise RuntimeError(f"TrainerGroup.ready must be called before {method}")
        calls = [(inputs[position.data], *arguments) for position in self._positions]
        return self.ranks.call(method, calls, result_ranks)
