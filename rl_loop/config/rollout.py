"""How episodes are run: ``rollout`` of a configuration."""

from pydantic import Field

from megatron_gptoss.config import StrictModel
from rl_loop.config.episode import EpisodeLimits, PurificationConfig
from rl_loop.engines.embedded.config import EmbeddedConfig
from rl_loop.engines.registry import AnyEngineConfig


class RolloutConfig(EpisodeLimits, StrictModel):
    """How episodes are run."""

    workers: int = Field(1, gt=0)
    """Rollout workers; each is a process with its own engine and sandbox."""
    tasks_per_step: int = Field(8, gt=0)
    """Tasks of one training step."""
    samples_per_task: int = Field(8, gt=0)
    """Episodes of each task; group-relative advantages compare them with one another."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer computes its log-probs at the same temperature."""
    evaluation_temperature: float = Field(1.0, ge=0)
    """Temperature of held-out evaluations; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 log-probs are not those of the sampled distribution, which biases
    training; a run warns at its start."""
    max_new_tokens_per_turn: int = Field(1024, gt=0)
    """Sampled tokens per turn."""
    engine: AnyEngineConfig = EmbeddedConfig()
    """What samples episodes. ``{type: transformers}`` is embedded in each worker, ``{type:
    sglang}`` runs servers on GPUs that all workers share, and ``{type: MODULE:CLASS, options:
    {...}}`` is a backend from outside the project."""
    concurrent_tasks: int = Field(256, gt=0)
    """Tasks, with all their episodes, that one worker runs at a time; more wait for their turn."""
    purification: PurificationConfig | None = None
    """Retry failed tool calls and keep the good one (CLEANER); null for episodes as they come."""
    routed_experts: bool = False
    """Record which experts the engine chose for every token. Default: true with
    ``algorithm.routing_replay: R3``, else false."""
    max_invalid_share: float = Field(0.2, ge=0, lt=1)
    """Largest share of a step's episodes that infrastructure failures (engine, sandbox, tool,
    checker) may end. Such episodes are left out of everything. Above this share, and after 64 of
    them in sequence, the run ends and names the failing component."""

    @property
    def max_response_tokens(self) -> int:
        """The most tokens that an episode can sample, its prompt and tool outputs aside."""
        limits = [self.max_tokens, self.max_turns * self.max_new_tokens_per_turn]
        if self.max_sampled_tokens is not None:
            limits.append(self.max_sampled_tokens)
        return min(limits)
