"""Time of a rollout on SGLang servers, from a simulation of one server.

The servers of a run are alike, so one server with its share of the episodes represents all. It
decodes its running requests together, gathers tool outputs, stops for their prefills, and ends with
the last episodes in a small batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launch.plan import MEASURED_GPU
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.planning.flops import MATMUL_CEILING
from rl_loop.engines.sglang.gpu_memory import mxfp4_expert_bytes
from rl_loop.engines.sglang.prefills import (
    GATHER_PASSES,
    GATHERED_SHARE,
    PREFILL_GRAPH_REQUESTS,
)

BANDWIDTH = 4.8e12
"""Memory bandwidth of an H200 in bytes/s, from its data sheet."""
READING_FACTOR = 1.12
"""Time of a decoding step per time to read its data."""
ARITHMETIC_FACTOR = {False: 1.0, True: 1.5}
"""Time of a decoding step per time of its arithmetic, in bf16 and with MXFP4 experts."""
LAYER_SECONDS = 50e-6
"""Time of a layer in addition to reading and arithmetic, for kernels that depend on neither.

The factors and this value are fitted to the decoding steps of the 20B in docs/performance/mxfp4.md:
3.72 to 8.81 ms with MXFP4 experts and 7.41 to 13.99 ms in bf16, with 8 to 256 requests.
"""
TENSOR_PARALLEL_LAYER_SECONDS = 5e-6
"""Additional time of a layer with tensor parallelism, for two all-reduces.

Fitted to one run: the 120B with adapters on 4 H200 (docs/performance/loop.md).
"""
GPU_SLOWDOWN = {"H100": 1.43}
"""Time of a decoding step relative to an H200, by GPU.

An H100 takes 16.33 ms for the 20B in bf16 with 64 requests, an H200 11.39 ms
(docs/performance/mxfp4.md).
"""
PREFILL_SECONDS = {False: 0.0025, True: 0.0055}
"""Time of a captured prefill in addition to a decoding step with as many tokens, in bf16 and MXFP4.

A batch of one tool output delays decoding by 9 to 10 ms with MXFP4 experts and by 11 to 12 ms in
bf16, according to the servers' logs of runs with the 20B on H200.
"""
EAGER_SECONDS = 0.025
"""Additional time of a prefill without CUDA graphs.

A turn of 190 tokens with 64 requests takes 3.73 s instead of 2.64 s (docs/performance/loop.md).
"""
PROMPTS_PER_SECOND = 45_000
"""Tokens per second in prefills of prompts. An assumption, as no run measured them separately."""
MEMORY_OF_LARGEST = 0.998
"""Factor per decoding step by which SGLang forgets the requests of its largest prefill."""
WORKER_SECONDS = 0.008
"""Elapsed time of a rollout worker per turn with routing replay. Its other episodes wait in this time.

Fitted to the duration of a whole run, so it contains everything that delays the next turn:
rendering and parsing of Harmony, the environment, calls of the sandbox, and waiting
for processors that trainer and servers also use. Client and checks alone take 1 to 3 ms of processor
time (``EPISODES_PER_WORKER`` of ``rl_loop.config.rollout``).

An estimate: 11 ms fit the only measured run with many episodes per worker (256), whose workers read
the routes of whole episodes. Routes of new tokens save about 3 ms (docs/performance/parts.md).
"""
OUTSIDE_SECONDS = 0.05
"""Seconds of an episode outside the server between two turns, if its worker is idle.

0.04 to 0.09 s in the first turns with 64 episodes per worker, according to the servers' logs.
"""
ROLLOUT_EDGES = 2.0
"""Seconds of a rollout before its first and after its last decoding step.

2 to 4 s according to the servers' logs of runs with the 20B.
"""
PROMPT_TOKENS = 240
OUTPUT_TOKENS = 13
"""Tokens of a prompt and of a tool's output in the measured runs."""


@dataclass(frozen=True)
class ServerModel:
    """Model, format and GPUs of one server."""

    model: ModelConfig
    mxfp4_experts: bool = False
    """True if the experts are in MXFP4."""
    tensor_parallel: int = 1
    """GPUs of the server."""
    gpu: str = "H200"
    """Name that contains the GPU's type, such as "NVIDIA H100 80GB HBM3"."""
    prefill_graphs: bool = True
    """True if prefills of tool outputs are CUDA graphs."""
    gather_passes: int = GATHER_PASSES
    """Decoding steps, plus one, that requests wait at most for a common prefill."""

    @property
    def measured_gpu(self) -> str:
        """Type of GPU whose measured rates are used: H200, unless the rates of ``gpu`` are known."""
        known = [name for name in GPU_SLOWDOWN if name in self.gpu]
        return known[0] if known else MEASURED_GPU

    def step_seconds(self, tokens: float, context: float) -> float:
        """Return the time of one decoding step.

        Args:
            tokens: running requests.
            context: tokens per request.
        """
        model = self.model
        # Q and output projection of every query head, key and value of every key/value head.
        heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
        attention = heads * model.head_size * model.hidden_size * model.num_layers
        # A step reads only one row of the embedding per request.
        output = model.vocab_size * model.hidden_size

        # Three matrices: gate, up and down.
        expert = 3 * model.hidden_size * model.intermediate_size
        computed = model.num_layers * expert
        read = 1.0
        if model.num_experts > 0:
            # Probability that no request is routed to an expert, for uniform routing.
            untouched = (1 - model.experts_per_token / model.num_experts) ** tokens
            read = 1 - untouched
            computed *= model.experts_per_token
        if self.mxfp4_experts:
            # For one rank, because the result is divided by the number of ranks below.
            expert_bytes = read * mxfp4_expert_bytes(model, 1)
        else:
            expert_bytes = 2 * read * max(1, model.num_experts) * expert * model.num_layers

        full = model.layer_types.count("full_attention")
        # A layer with a window reads at most its window from the cache.
        window = min(context, model.sliding_window or context)
        attended_tokens = full * context + (model.num_layers - full) * window
        # Factor 4: a key and a value in bf16.
        cache = 4 * tokens * attended_tokens * model.num_key_value_heads * model.head_size

        # 2 bytes per weight in bf16, and 2 operations per weight and token.
        reading = (2 * (attention + output) + expert_bytes + cache) / BANDWIDTH
        arithmetic = 2 * tokens * (attention + output + computed) / MATMUL_CEILING
        layer = LAYER_SECONDS
        if self.tensor_parallel > 1:
            layer += TENSOR_PARALLEL_LAYER_SECONDS
        work = READING_FACTOR * reading + ARITHMETIC_FACTOR[self.mxfp4_experts] * arithmetic
        # Ranks divide the work, but each of them launches the kernels of every layer.
        seconds = work / self.tensor_parallel + layer * model.num_layers
        return seconds * GPU_SLOWDOWN.get(self.measured_gpu, 1.0)

    def prefill_seconds(self, requests: int) -> float:
        """Return the time that a prefill of tool outputs holds decoding up."""
        fixed = PREFILL_SECONDS[self.mxfp4_experts]
        if not self.prefill_graphs:
            fixed += EAGER_SECONDS
        fixed *= GPU_SLOWDOWN.get(self.measured_gpu, 1.0)
        return fixed + self.step_seconds(OUTPUT_TOKENS * requests, 0)


@dataclass(frozen=True)
class EpisodeLengths:
    """Lengths of sampled turns: geometric, cut by the limits."""

    mean_turn: float
    """Mean sampled tokens of a turn before limits."""
    turns: int
    """Turns of an episode, if its tokens suffice."""
    max_turn: int
    """Limit of a turn in tokens."""
    max_tokens: int
    """Limit of an episode in tokens, with prompt and tool outputs."""

    def sample(self, episodes: int, seed: int = 0) -> list[list[int]]:
        """Return the sampled tokens of every turn of every episode."""
        random = np.random.default_rng(seed)
        # As if every token ended its turn with the same probability. Long turns, which decide when
        # a rollout ends, are then as frequent as a mean alone allows to assume.
        drawn = random.geometric(1 / max(1.0, self.mean_turn), (episodes, self.turns))
        kept = []
        for row in np.clip(drawn, 1, self.max_turn):
            left = max(1, self.max_tokens - PROMPT_TOKENS)
            turns = []
            for turn in row.tolist():
                turns.append(min(turn, left))
                left -= turn + OUTPUT_TOKENS
                if left <= 0:
                    break
            kept.append(turns)
        return kept


@dataclass(frozen=True)
class RolloutTime:
    """Predicted rollout of one server."""

    seconds: float
    """Time of the rollout, with its begin and end."""
    tokens: int
    """Sampled tokens, prompts and tool outputs."""


def simulate_rollout(
    server: ServerModel,
    episodes: Sequence[Sequence[int]],
    slots: int,
    workers: float,
    tool_seconds: float = 0.0,
) -> RolloutTime:
    """Simulate one server from the first prompt to the end of the last episode.

    Args:
        server: server that samples.
        episodes: sampled tokens of every turn of every episode.
        slots: requests that the server runs at a time.
        workers: rollout workers per server.
        tool_seconds: duration of a tool call.
    """
    simulation = _Simulation(server, episodes, slots, WORKER_SECONDS / workers, tool_seconds)
    simulation.run()
    return RolloutTime(simulation.now + ROLLOUT_EDGES, int(simulation.length.sum()))


class _Simulation:
    """One server and its episodes on a virtual clock. Arrays have one element per episode."""

    def __init__(
        self,
        server: ServerModel,
        episodes: Sequence[Sequence[int]],
        slots: int,
        worker_seconds: float,
        tool_seconds: float,
    ) -> None:
        count = len(episodes)
        self.server = server
        self.episodes = episodes
        self.slots = slots
        self.worker_seconds = worker_seconds
        self.tool_seconds = tool_seconds
        # The clock starts after the prefill of all prompts.
        self.now = count * PROMPT_TOKENS / PROMPTS_PER_SECOND
        self.worker_free_at = 0.0
        self.is_running = np.zeros(count, dtype=bool)
        # Infinite while an episode runs, and after its end.
        self.ready_at = np.full(count, self.now)
        self.turn = np.zeros(count, dtype=int)
        self.left = np.zeros(count, dtype=int)
        """Tokens until the end of the turn."""
        self.length = np.full(count, PROMPT_TOKENS)
        self.waited = 0
        """Decoding steps since a request could have been prefilled."""
        self.largest_prefill = 0.0
        """Requests of the largest prefill, less what SGLang has forgotten."""

    def run(self) -> None:
        """Advance the clock to the end of the last episode."""
        while self.is_running.any() or np.isfinite(self.ready_at).any():
            free = self.slots - int(self.is_running.sum())
            waiting = np.flatnonzero(self.ready_at <= self.now)
            can_prefill = len(waiting) > 0 and free > 0
            if can_prefill and not self._gathers(len(waiting), free):
                # In the order in which the episodes became ready.
                order = np.argsort(self.ready_at[waiting], kind="stable")
                self._prefill(waiting[order][: min(free, PREFILL_GRAPH_REQUESTS)])
            elif self.is_running.any():
                steps = self._decode(until_ready=free > 0, gathers=can_prefill)
                self.waited = self.waited + steps if can_prefill else 0
                self._end_turns()
            else:
                self.now = float(self.ready_at.min())

    def _gathers(self, waiting: int, free: int) -> bool:
        """Return True if the server waits for further requests, as SGLang's prefill delayer does.

        Args:
            waiting: requests that could be prefilled.
            free: requests that may still be admitted.
        """
        running = self.slots - free
        if running == 0 or self.waited >= self.server.gather_passes - 1:
            return False
        largest = int(self.largest_prefill)
        return free < largest or waiting < min(int(running * GATHERED_SHARE), largest)

    def _prefill(self, admitted: np.ndarray) -> None:
        """Begin the next turn of some episodes. The running requests wait."""
        self.left[admitted] = [self.episodes[index][self.turn[index]] for index in admitted]
        self.ready_at[admitted] = np.inf
        self.is_running[admitted] = True
        self.now += self.server.prefill_seconds(len(admitted))
        self.waited = 0
        self.largest_prefill = max(self.largest_prefill, len(admitted))

    def _decode(self, until_ready: bool, gathers: bool) -> int:
        """Decode until the first turn ends, or until an episode is ready to be admitted.

        Args:
            until_ready: whether an episode could be admitted.
            gathers: whether episodes wait for a common prefill.

        Returns:
            Number of decoding steps.
        """
        running = self.is_running
        context = float(self.length[running].mean())
        # No request begins or ends until the next event, so all steps until then are taken at once,
        # with the duration of the first one.
        step = self.server.step_seconds(int(running.sum()), context)
        steps = int(self.left[running].min())
        next_ready = self.ready_at.min(where=self.ready_at > self.now, initial=np.inf)
        if until_ready and np.isfinite(next_ready):
            steps = min(steps, int(np.ceil((next_ready - self.now) / step)))
        if gathers:
            steps = min(steps, self.server.gather_passes - 1 - self.waited)
        self.now += steps * step
        self.left[running] -= steps
        self.length[running] += steps
        self.largest_prefill *= MEMORY_OF_LARGEST**steps
        return steps

    def _end_turns(self) -> None:
        """Pass the turns that have no tokens left to the rollout workers."""
        for index in np.flatnonzero(self.is_running & (self.left == 0)).tolist():
            self.is_running[index] = False
            self.turn[index] += 1
            if self.turn[index] < len(self.episodes[index]):
                self.length[index] += OUTPUT_TOKENS
                # Workers process one turn after the other.
                self.worker_free_at = max(self.worker_free_at, self.now) + self.worker_seconds
                self.ready_at[index] = self.worker_free_at + OUTSIDE_SECONDS + self.tool_seconds
