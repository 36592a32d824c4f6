"""How episodes are run: ``rollout`` of a configuration."""

from typing import Literal

from pydantic import Field

from megatron_gptoss.config import StrictModel
from rl_loop.config.episode import EpisodeLimits, PurificationConfig
from rl_loop.engines.sglang.config import SglangConfig


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
    """Nucleus sampling. Below 1 the sampled distribution is not the one whose log-probs are trained on."""
    max_new_tokens_per_turn: int = Field(1024, gt=0)
    """Sampled tokens per turn."""
    engine: Literal["transformers", "sglang"] = "transformers"
    """``transformers`` is embedded in each worker; ``sglang`` runs servers on GPUs that all workers share."""
    sglang: SglangConfig = SglangConfig()
    """The servers of engine sglang."""
    max_batch_size: int = Field(64, gt=0)
    """Sequences that one embedded engine decodes together."""
    purification: PurificationConfig | None = None
    """Retry failed tool calls and keep the good one (CLEANER); null for episodes as they come."""
    routed_experts: bool = False
    """Record which experts the engine chose for every token."""
    max_invalid_share: float = Field(0.2, ge=0, lt=1)
    """Largest share of a step's episodes that infrastructure failures (engine, sandbox, tool, checker) may end. Such
    episodes are left out of everything; above this share the run ends and names the culprit."""
    max_invalid_streak: int = Field(64, gt=0)
    """As many such episodes one after the other end the run at once."""

    @property
    def max_response_tokens(self) -> int:
        """The most tokens that an episode can sample, its prompt and tool outputs aside."""
        limits = [self.max_tokens, self.max_turns * self.max_new_tokens_per_turn]
        if self.max_sampled_tokens is not None:
            limits.append(self.max_sampled_tokens)
        return min(limits)
