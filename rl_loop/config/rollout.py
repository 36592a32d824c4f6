"""Section ``rollout`` of a configuration: sampling and running of episodes."""

from pydantic import Field

from megatron_gptoss.config import StrictModel
from rl_loop.config.episode import EpisodeLimits, PurificationConfig
from rl_loop.engines.embedded.config import EmbeddedConfig
from rl_loop.engines.registry import AnyEngineConfig

EPISODES_PER_WORKER = 64
"""Episodes of a step for which there is one rollout worker by default.

The other episodes of a worker wait while it processes a turn. The SGLang client, the checks of its
results and the sampling of a turn take 1 to 3 ms of processor time on an idle machine
(docs/performance/parts.md). The elapsed time of a turn in a run is longer: about 8 ms, with Harmony,
environment, sandbox and waiting for processors (``WORKER_SECONDS`` of ``launch.rollout_time``).
"""


class RolloutConfig(EpisodeLimits, StrictModel):
    """Sampling and running of episodes."""

    workers: int | None = Field(None, gt=0)
    """Number of rollout workers. Each is a process that runs episodes, with a sandbox and, for
    ``type: embedded``, an engine. Default: one for every 64 episodes of a step; one if workers
    have engines."""
    tasks_per_step: int = Field(8, gt=0)
    """Number of tasks in a training step."""
    samples_per_task: int = Field(8, gt=0)
    """Episodes per task. Group-relative advantages compare them with each other."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. The trainer computes its log-probs at the same temperature."""
    evaluation_temperature: float = Field(1.0, ge=0)
    """Sampling temperature of held-out evaluations. 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the recorded log-probs differ from the sampled distribution, which
    biases training, and a run logs a warning at its start."""
    max_sampled_tokens_per_turn: int = Field(1024, gt=0)
    """Maximum sampled tokens per turn."""
    engine: AnyEngineConfig = EmbeddedConfig()
    """Engine that samples episodes. ``{type: embedded}`` is embedded in each worker. ``{type:
    sglang}`` runs servers on GPUs, which all workers share. ``{type: MODULE:CLASS, options:
    {...}}`` is an external backend."""
    max_concurrent_tasks: int = Field(256, gt=0)
    """Maximum tasks, with all their episodes, that one worker runs at a time. Further tasks
    wait."""
    purification: PurificationConfig | None = None
    """Retry failed tool calls and keep the successful one (CLEANER). null for unmodified
    episodes."""
    routed_experts: bool = False
    """Record the experts that the engine chose for every token. Default: true with
    ``algorithm.routing_replay: R3``, else false."""
    max_invalid_fraction: float = Field(0.2, ge=0, lt=1)
    """Maximum share of a step's episodes that infrastructure failures (engine, sandbox, tool,
    checker) end. Such episodes are left out of training and metrics. The run ends above this share,
    and after 64 such episodes in groups without a valid episode. The message names the failing
    component."""

    @property
    def worker_count(self) -> int:
        """Number of rollout workers."""
        if self.workers is not None:
            return self.workers
        # Every embedded engine needs memory for a copy of the weights, and cores.
        if isinstance(self.engine, EmbeddedConfig):
            return 1
        return -(-self.tasks_per_step * self.samples_per_task // EPISODES_PER_WORKER)

    @property
    def max_response_tokens(self) -> int:
        """Maximum sampled tokens of an episode, without prompt and tool outputs."""
        # Prompt and tool outputs count in max_episode_tokens, so this is only an upper bound.
        limits = [self.max_episode_tokens, self.max_turns * self.max_sampled_tokens_per_turn]
        if self.max_sampled_tokens is not None:
            limits.append(self.max_sampled_tokens)
        return min(limits)
