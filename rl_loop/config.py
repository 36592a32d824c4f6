"""The one typed configuration of a run: what YAML files in ``configs/`` say and ``gptoss`` commands override. Reading
imports neither torch nor Ray, so a mistake is reported at once."""

import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, model_validator
from yaml import YAMLError

from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig, StrictModel, Training
from rl_loop.agent import EpisodeLimits
from rl_loop.algorithms.config import GROUP_ADVANTAGES, AlgorithmConfig, refuse
from rl_loop.demonstrations import DemonstrationConfig
from rl_loop.engines.sglang_config import SglangConfig
from rl_loop.environments import RewardConfig, environment_class
from rl_loop.harmony import PromptConfig
from rl_loop.purification import PurificationConfig
from rl_loop.sandbox.config import SandboxConfig


class ConfigError(ValueError):
    """A configuration file or an override is wrong; the message names the file and every key."""


class PassRateConfig(StrictModel):
    """Training tasks by how often a policy solved them: those that it always or never solves teach nothing."""

    episodes: Path
    """What ``gptoss eval`` wrote on the same tasks; tasks that are not in it are kept."""
    minimum: float = Field(0.05, ge=0, le=1)
    """Smallest share of correct episodes."""
    maximum: float = Field(0.95, ge=0, le=1)
    """Largest share of correct episodes."""


class SourceConfig(StrictModel):
    """Tasks of one environment: from data, or generated where it can generate."""

    environment: str
    """A name that ``rl_loop.environments`` knows, or MODULE:CLASS."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the environment: the fields of its ``Options``."""
    train_path: str | None = None
    """A .jsonl or .parquet file, or hub:NAME:SPLIT; null for generated tasks. Shuffled anew in each epoch."""
    held_out_path: str | None = None
    """The tasks on which accuracy is measured; training tasks that share a prompt or 13 words with them are dropped."""
    weight: float = Field(1.0, ge=0)
    """Share of the training tasks, relative to the other sources; 0 only evaluates."""
    pass_rate: PassRateConfig | None = None
    """Leave out training tasks that are too easy or too hard; needs train_path."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.train_path is not None and self.held_out_path is None:
            raise ValueError("train_path needs held_out_path: accuracy is measured on tasks that are not trained on")
        if self.held_out_path is not None and self.train_path is None and self.weight > 0:
            raise ValueError("held_out_path without train_path: give train_path, or weight 0 to evaluate only")
        if self.pass_rate is not None and self.train_path is None:
            raise ValueError("pass_rate filters the tasks of train_path, which is not given")
        environment_class(self.environment).Options.model_validate(self.options)
        return self


class TaskConfig(StrictModel):
    """What is trained on and measured: a mixture of sources."""

    sources: dict[str, SourceConfig] = Field({"retool": SourceConfig(environment="retool")}, min_length=1)
    """By a name of your choice."""
    seed: int = 0
    """Of generators, and of the order of data."""
    held_out_tasks: int = Field(128, gt=0)
    """How many held-out tasks of each source an evaluation uses."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any(source.weight > 0 for source in self.sources.values()):
            raise ValueError("no source has a weight above 0")
        return self


class EvaluationConfig(StrictModel):
    """How ``gptoss eval`` measures."""

    samples_per_task: int = Field(1, gt=0)
    """Episodes of each held-out task: what avg@k, pass@k and maj@k are computed from, for k = 2, 4, ... up to it."""
    endpoint: str | None = None
    """An OpenAI-compatible server whose completions return token ids, such as http://host:8000/v1; null for our own."""
    endpoint_model: str = "default"
    """The model's name there."""
    concurrency: int = Field(64, gt=0)
    """Episodes at a time with an endpoint."""


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


class TrainingConfig(StrictModel):
    """The length of a run and what happens along the way."""

    steps: int = Field(100, gt=0)
    """Training steps."""
    max_tokens_per_micro_batch: int = Field(16384, gt=0)
    """Packed tokens that one forward and backward pass takes at a time; bounds activation memory."""
    checkpoint_every: int = Field(20, gt=0)
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = Field(2, gt=0)
    """Older checkpoints are deleted."""
    episodes_in_report: int = Field(4, ge=0)
    """Whole episodes kept per step for the report."""


class AblationConfig(StrictModel):
    """Faults on purpose, for experiments that show what they do. Leave everything at its default to train a model."""

    freeze: tuple[Literal["attention", "experts"], ...] = ()
    """Parts that do not learn: attention with its sinks and norm, or the experts with their router and norm."""
    sink_gradient: bool = True
    """Whether the sinks get a gradient in the trainer."""
    sink_backward: bool = True
    """Whether the backward pass of the trainer's attention has sinks, if the forward pass has; false is what comes of
    kernels that were made for attention without sinks."""
    trainer_sinks: bool = True
    """Whether the trainer's attention has sinks."""
    engine_sinks: bool = True
    """Whether the engine's attention has sinks."""
    engine_noise: float = Field(0.0, ge=0)
    """The engine's weights are off by this times their standard deviation, anew at every weight sync."""
    router_noise: float = Field(0.0, ge=0)
    """Standard deviation of noise on the trainer's router logits, as of kernels whose sums have no fixed order."""


class RunConfig(StrictModel):
    """What every run has."""

    command: ClassVar[str]
    """The ``gptoss`` command that runs it."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run; its directory is ``output_dir/name``."""
    output_dir: Path = Path("runs")
    """Where run directories are made."""
    seed: int = 0
    """Of everything random: initial weights, data order, sampling."""
    model: ModelConfig
    """The architecture; a string names a file of ``configs/model``."""
    initial_weights: Path | None = None
    """A Hugging Face directory, a Megatron checkpoint or a run directory to start from; null for random weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of parameters and activations."""
    vocabulary: Literal["gptoss", "tiny"] = "gptoss"
    """``gptoss``: the 201,088 token ids of the released models. ``tiny``: those of them that generated tasks and their
    demonstrations need, and the Harmony special tokens; for models of a laptop."""
    prompt: PromptConfig = PromptConfig()
    """The Harmony system message."""
    tasks: TaskConfig = TaskConfig()
    """Training and held-out tasks."""
    parallel: ParallelConfig = ParallelConfig()
    """How the trainer is spread over ranks."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    training: TrainingConfig = TrainingConfig()
    """Length of the run."""
    rollout: RolloutConfig = RolloutConfig()
    """Episodes; of a supervised run only for its evaluation at the end."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits of model-written code."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How ``gptoss eval`` measures."""
    reward: RewardConfig = RewardConfig()
    """What an episode earns."""

    ablation: AblationConfig = AblationConfig()
    """Faults on purpose."""

    @property
    def directory(self) -> Path:
        return self.output_dir / self.name

    @property
    def memory_inputs(self) -> Training:
        """What ``megatron_gptoss.memory`` predicts from."""
        row, longest = self.training.max_tokens_per_micro_batch, self.rollout.max_tokens
        return Training(self.model, self.parallel, self.optimizer, row, longest=longest)

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        self.parallel.check_layout(self.model)
        rollout, ablation, row = self.rollout, self.ablation, self.training.max_tokens_per_micro_batch
        refuse({
            f"rollout.max_tokens ({rollout.max_tokens}) exceeds training.max_tokens_per_micro_batch ({row}): the "
            "longest episode would not fit a micro-batch": rollout.max_tokens > row,
            "ablation.engine_sinks and engine_noise need rollout.engine=transformers":
                rollout.engine == "sglang" and (not ablation.engine_sinks or ablation.engine_noise),
            f"rollout.purification scores at rollout.temperature ({rollout.temperature}), and SGLang scores "
            "at temperature 1 only: set rollout.temperature=1 or rollout.engine=transformers":
                rollout.purification and rollout.engine == "sglang" and rollout.temperature != 1,
            f"rollout.max_tokens ({rollout.max_tokens}) exceeds model.max_length ({self.model.max_length})":
                rollout.max_tokens > self.model.max_length,
        })  # fmt: skip
        return self


class RlConfig(RunConfig):
    """``gptoss rl``: on-policy reinforcement learning."""

    command: ClassVar[str] = "rl"

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and the policy loss."""
    evaluate_every: int = Field(10, gt=0)
    """Steps between measurements of held-out accuracy; also before the first step and after the last."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest mean |log-prob difference| between engine and trainer on a canary prompt after a sync, in nats. null:
    0.001 in float32, 0.02 in bfloat16. Stay above what ``gptoss doctor --engine`` shows of a good engine."""

    @property
    def memory_inputs(self) -> Training:
        algorithm, rollout, inputs = self.algorithm, self.rollout, super().memory_inputs
        critic = [algorithm.critic.optimizer] if algorithm.critic else []
        engine = rollout.sglang.memory_fraction * (rollout.engine == "sglang" and rollout.sglang.colocated)
        return inputs._replace(
            beside=[*critic, *([None] if algorithm.kl else [])],
            engine=engine,
            mini_batches=algorithm.mini_batches,
        ).with_sequences(rollout.tasks_per_step * rollout.samples_per_task)

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        algorithm, rollout, steps = self.algorithm, self.rollout, self.training.steps
        episodes = rollout.tasks_per_step * rollout.samples_per_task
        warmup_steps = algorithm.critic.warmup_steps if algorithm.critic else 0
        refuse({
            f"rollout.tasks_per_step x samples_per_task ({episodes}) gives fewer episodes than data-parallel ranks "
            f"x algorithm.mini_batches ({self.parallel.data} x {algorithm.mini_batches})":
                episodes < self.parallel.data * algorithm.mini_batches,
            f"algorithm.advantage {algorithm.advantage} compares the samples of a task, and rollout.samples_per_task "
            "is 1: use 2 or more, or advantage gae or reinforce":
                algorithm.advantage in GROUP_ADVANTAGES and rollout.samples_per_task == 1,
            f"algorithm.max_staleness {algorithm.max_staleness}: rollouts begin one step ahead of their training at "
            "most, so no token is ever older; use 1, or 0 to be strictly on-policy": algorithm.max_staleness > 1,
            "algorithm.max_staleness 1 generates while the trainer learns, and rollout.sglang.colocated gives its "
            "GPUs to one of them at a time: use 0, or servers on GPUs of their own":
                algorithm.max_staleness and rollout.engine == "sglang" and rollout.sglang.colocated,
            "algorithm.routing_replay R3 needs the engine's routes: set rollout.routed_experts":
                algorithm.routing_replay == "R3" and not rollout.routed_experts,
            f"algorithm.overlong_buffer ({algorithm.overlong_buffer}) must be below the longest response "
            f"({rollout.max_response_tokens}, the least of rollout.max_sampled_tokens, max_tokens and max_turns x "
            "max_new_tokens_per_turn), or every episode is punished for its length":
                (algorithm.overlong_buffer or 0) >= rollout.max_response_tokens,
            f"algorithm.critic.warmup_steps ({warmup_steps}) leaves none of the {steps} steps to the policy":
                warmup_steps >= steps,
        })  # fmt: skip
        return self


def check_reward_parts(config: RlConfig, parts: set[str]) -> None:
    """Raise ConfigError if gdpo is to weigh reward parts that no environment has. ``parts``: of all environments."""
    unknown = sorted(set(config.algorithm.reward_weights) - parts)
    if unknown:
        raise ConfigError(
            f"algorithm.reward_weights: no environment of tasks.sources has a reward part {', '.join(unknown)}; there "
            f"are {', '.join(sorted(parts))} (an environment's own are those that unfinished() returns)"
        )


class SftConfig(RunConfig):
    """``gptoss sft``: supervised fine-tuning on generated demonstrations."""

    command: ClassVar[str] = "sft"

    demonstrations: DemonstrationConfig = DemonstrationConfig()
    """What the demonstrations are made of."""
    sequences_per_step: int = Field(64, gt=0)
    """Demonstrations (episodes) of one optimizer step."""


def load_config[Config: RunConfig](path: Path, kind: type[Config], overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply ``key.sub=value`` overrides and validate. Raises ConfigError naming file and keys.
    ``model: NAME`` and ``algorithm: NAME`` stand for NAME.yaml in a folder of that name beside the file's own."""
    tree = read_yaml(path)
    changes = overrides or []
    for item in changes:
        if not re.match("[^=]+=", item):
            raise ConfigError(f"override {item!r}: expected key=value, such as optimizer.lr=1e-6")
    for key in ("model", "algorithm"):
        named = [item.partition("=")[2] for item in changes if item.startswith(f"{key}=")] or [tree.get(key)]
        changes = [item for item in changes if not item.startswith(f"{key}=")]
        if isinstance(named[-1], str):
            file = path.parent.parent / key / f"{named[-1]}.yaml"
            if not file.exists():
                known = ", ".join(sorted(p.stem for p in file.parent.glob("*.yaml"))) or "none"
                raise ConfigError(f"{path}: {key}: there is no {file}; those there: {known}")
            tree[key] = read_yaml(file)
    try:
        raw = OmegaConf.to_container(OmegaConf.merge(tree, OmegaConf.from_dotlist(changes)), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    return validated(path, kind, raw)


def validated[Model: StrictModel](path: Path, kind: type[Model], raw: Any) -> Model:
    """``raw``, read from ``path``, as ``kind``. Raises ConfigError naming file and keys."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        _refuse_other_kind(path, kind, error)
        lines = [f"  {'.'.join(map(str, e['loc'])) or '(top level)'}: {_explain(e)}" for e in error.errors()]
        raise ConfigError(f"{path} is not a valid {kind.__name__}:\n" + "\n".join(lines)) from None


def _refuse_other_kind(path: Path, kind: type[StrictModel], error: ValidationError) -> None:
    """Raise ConfigError if the keys that ``kind`` does not know are those of the other kind of run."""
    unknown = [str(e["loc"][0]) for e in error.errors() if e["type"] == "extra_forbidden" and len(e["loc"]) == 1]
    for this, other in ((RlConfig, SftConfig), (SftConfig, RlConfig)):
        own = [key for key in unknown if key in other.model_fields]
        if kind is this and own:
            hint = "; `gptoss plan` and `gptoss launch` take it with --sft" if this is RlConfig else ""
            raise ConfigError(
                f"{path} is a configuration of `gptoss {other.command}` (it has {', '.join(own)}), "
                f"not of `gptoss {this.command}`{hint}"
            ) from None


def dump_config(config: StrictModel) -> str:
    """YAML of the whole configuration, defaults included; ``load_config`` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def read_yaml(path: Path) -> Any:
    """The mapping in a YAML file. Raises ConfigError naming the file."""
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    if not OmegaConf.is_dict(tree):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    return tree


def _explain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    message = error["msg"].removeprefix("Value error, ")
    value = error["input"]
    return f"{message} (got {value!r})" if not isinstance(value, dict | list) else message
