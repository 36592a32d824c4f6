"""Checks the requirements of a run in 1-2 s, before Ray, torch or any weights are loaded.

Every check raises ``StartError`` with one line that names the key and a remedy. Nothing is
written. Faults that only the real operation reveals, such as unreadable weights or an unhealthy
server, show up later.
"""

import importlib.util
import logging
import os
from dataclasses import replace
from pathlib import Path

from megatron_gptoss.nvidia_smi import smallest_gpu
from rl_loop.chat.tokenizer_vocabulary import text_tokens
from rl_loop.cluster.placement import has_placement
from rl_loop.config.errors import StartError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.rollout_advice import rollout_warnings
from rl_loop.config.run import RlConfig, SftConfig, read_model
from rl_loop.config.tasks import SourceConfig
from rl_loop.conversations.config import DataConfig
from rl_loop.data.hub import is_hub_dataset
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.environments import environment_class
from rl_loop.lifecycle.address_checks import check_endpoint, check_ray_address
from rl_loop.lifecycle.disk_checks import check_disk, check_writable, disk_need
from rl_loop.lifecycle.error_hints import how_to_make
from rl_loop.lifecycle.store_size import (
    WEIGHT_COPIES,
    StoreNeed,
    check_local_store,
    evaluation_store_need,
    rl_store_need,
    sft_store_need,
)
from rl_loop.lifecycle.vocabulary_checks import check_chat_format, check_tiny_vocabulary
from rl_loop.lifecycle.weight_checks import (
    check_initial_adapter,
    check_newest_checkpoint,
    check_weights,
)
from rl_loop.sandbox import check_isolation
from rl_loop.tasks.codec import tokenizer_directory
from rl_loop.tasks.task_file import TaskData
from rl_loop.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)

ASSUMED_TURNS = 4
"""Turns of the assistant in a conversation that is not read yet, to predict memory."""
MAX_CHECKED_FILE_BYTES = 20 << 20
"""Maximum size of a task file whose rows are all checked, 20 MiB.

Larger files would take too long.
"""


def check_run_requirements(config: RunConfig, has_own_ray: bool = False) -> None:
    """Check the requirements of ``gptoss sft`` or ``gptoss rl``.

    Args:
        config: configuration of the run.
        has_own_ray: True if the run will have another RAY_ADDRESS than this process.

    Raises:
        StartError: a requirement is missing.
        SandboxUnavailableError, TaskFileError, VocabularyUnavailableError: the sandbox, a task file or the
            vocabulary is missing.
    """
    check_chat_format(config)
    check_tiny_vocabulary(config)
    if not has_own_ray:
        check_ray_address()

    if config.initial_weights is not None:
        check_weights("initial_weights", config.initial_weights, config.model)
    if config.initial_adapter is not None and config.adapter is not None:
        check_initial_adapter(config.initial_adapter, config.adapter, config.model)
    for key, teacher in config.teacher_paths.items():
        check_teacher(key, teacher, config)
    # A resumed run loads this checkpoint. A new run has no checkpoint, so the check passes.
    check_newest_checkpoint(RunDirectory(config.directory))

    # Supervised fine-tuning reads either conversations or tasks.
    if isinstance(config, SftConfig) and config.data is not None:
        check_conversations(config.data)
    else:
        check_data(config)
    if isinstance(config, SftConfig):
        check_engine(config, uses_engine=config.samples)
    if isinstance(config, RlConfig):
        check_rollouts(config)
        warn_about_sampling(config)
        warn_about_rollouts(config)
    check_tracking()

    # The disk must also hold the checkpoints and exports that are written hours later.
    check_disk(config.directory, disk_need(config))

    # A running Ray keeps its store, so check only the store of a Ray that this run starts.
    if has_own_ray or not os.environ.get("RAY_ADDRESS"):
        check_local_store(store_need(config))


def check_teacher(key: str, teacher: Path, config: RunConfig) -> None:
    """Check that a directory has a teacher for the configured model.

    Args:
        key: configuration key of the teacher, for messages.
        teacher: directory.
        config: configuration of the run.

    Raises:
        StartError: the weights are missing or incomplete, the vocabularies differ, or the
            teacher does not fit the layout of the policy.
        TokenizerError: a tokenizer cannot be read.
    """
    try:
        model = read_model(teacher)
    except ValueError as error:
        raise StartError(f"{key}: {error}") from None
    if model is None:
        raise StartError(
            f"{key}: {teacher} has no config.json. Name a Hugging Face directory, such as the "
            "export of a run"
        )

    check_weights(key, teacher, model)
    if model.vocab_size != config.model.vocab_size:
        raise StartError(
            f"{key}: {teacher} has {model.vocab_size} token ids, but model.vocab_size is "
            f"{config.model.vocab_size}. Use a teacher with the vocabulary of the model"
        )

    if isinstance(config, RlConfig) and config.rollout.max_episode_tokens > model.max_length:
        raise StartError(
            f"{key}: {teacher} takes at most {model.max_length} tokens, but "
            f"rollout.max_episode_tokens is {config.rollout.max_episode_tokens}. Lower it, or use "
            "another teacher"
        )

    policy_tokenizer = tokenizer_directory(config.tokenizer_source)
    theirs = tokenizer_directory(teacher)
    if (
        policy_tokenizer is not None
        and theirs is not None
        and text_tokens(policy_tokenizer) != text_tokens(theirs)
    ):
        raise StartError(
            f"{key}: the tokenizers of {theirs} and {policy_tokenizer} have different tokens. Use a "
            "teacher with the vocabulary of the model"
        )
    try:
        config.parallel.for_teacher(model).check_layout(model, None, ())
    except ValueError as error:
        raise StartError(f"{key}: {teacher} does not fit the layout: {error}") from None


def check_evaluation_requirements(config: RunConfig, weights: Path | None, output: Path) -> None:
    """Check the requirements of ``gptoss eval``, like ``check_run_requirements``.

    Args:
        config: configuration of the evaluation.
        weights: replace the configuration's weights.
        output: file for the episodes.
    """
    endpoint = config.evaluation.endpoint
    if isinstance(config, SftConfig):
        check_held_out_conversations(config)
    check_chat_format(config)
    # An endpoint needs no Ray. A running Ray keeps its store.
    if endpoint is None and not os.environ.get("RAY_ADDRESS"):
        held_out = len(config.tasks.sources) * config.tasks.held_out_tasks
        # The number of turns of conversations is not known yet.
        tasks = held_out if isinstance(config, RlConfig) else 0
        check_local_store(evaluation_need(config, tasks))
    if endpoint is not None:
        check_endpoint(endpoint)
    elif weights is not None:
        check_weights("--weights", weights, config.model)
    elif config.initial_adapter is not None:
        raise StartError(
            "initial_adapter: evaluation needs a whole model, but these are adapters. Merge "
            "them (gptoss convert merge), and pass the result as --weights"
        )
    elif config.initial_weights is not None:
        check_weights("initial_weights", config.initial_weights, config.model)
    else:
        raise StartError(
            "nothing to evaluate. Pass --weights, or set initial_weights or evaluation.endpoint"
        )

    if endpoint is None:
        check_ray_address()
    if isinstance(config, SftConfig):
        check_engine(config, uses_engine=endpoint is None)
    else:
        check_data(config)
        check_rollouts(config, uses_engine=endpoint is None)
    check_writable(output.parent)


def check_server_requirements(config: RunConfig, weights: Path | None) -> None:
    """Check the requirements of ``gptoss serve``, like ``check_run_requirements``.

    ``weights`` replace the configuration's weights.
    """
    check_chat_format(config)
    if weights is not None:
        check_weights("--weights", weights, config.model)
    elif config.initial_weights is not None:
        check_weights("initial_weights", config.initial_weights, config.model)
    else:
        raise StartError("there is no model. Pass --weights, or set initial_weights")

    if config.rollout.engine.server_processes is not None:
        check_ray_address()
    # On a cluster the engine runs on another machine, which this process cannot check.
    if runs_here():
        config.rollout.engine.check_machine()


def check_play_requirements(config: RunConfig, weights: Path | None, *, uses_model: bool) -> None:
    """Check the requirements of ``gptoss play``, like ``check_run_requirements``.

    Args:
        config: configuration of a run.
        weights: replace the configuration's weights.
        uses_model: True if a model samples the turns.
    """
    endpoint = config.evaluation.endpoint if isinstance(config, RlConfig) else None
    uses_engine = uses_model and endpoint is None
    if uses_engine:
        check_server_requirements(config, weights)
    else:
        check_chat_format(config)
    if uses_model and endpoint is not None:
        check_endpoint(endpoint)
    check_data(config)
    check_rollouts(config, uses_engine=uses_engine)


def check_data(config: RunConfig) -> None:
    """Check every file in ``tasks.sources``, and every row of small ones.

    Data sets of the hub are not read.
    """
    for name, source in config.tasks.sources.items():
        key = f"tasks.sources.{name}"
        for field, path in (
            ("train_path", source.train_path),
            ("held_out_path", source.held_out_path),
        ):
            if path is not None and not is_hub_dataset(path):
                _check_file(f"{key}.{field}", Path(path))
                _read_rows(source, path)
        if source.pass_rate is not None and source.pass_rate.episodes is not None:
            _check_file(f"{key}.pass_rate.episodes", source.pass_rate.episodes)


def check_conversations(data: DataConfig) -> None:
    """Check every file in ``data``. Data sets of the hub are not checked."""
    for name, source in data.sources.items():
        for field, path in (("path", source.path), ("validation_path", source.validation_path)):
            if path is not None and not is_hub_dataset(path):
                _check_file(f"data.sources.{name}.{field}", Path(path))


def check_held_out_conversations(config: SftConfig) -> None:
    """Check that ``data`` holds out conversations, and that its files exist."""
    data = config.data
    if data is None:
        raise StartError(
            f"{config.name} trains on demonstrations. Name a configuration of `gptoss rl`, or one "
            "of `gptoss sft` with conversations (data)"
        )
    if not data.holds_out_conversations:
        raise StartError(
            f"data: {config.name} holds out no conversations. Set data.validation_path or "
            "data.validation_fraction"
        )
    check_conversations(data)


def _check_file(key: str, path: Path) -> None:
    if not path.exists():
        raise StartError(f"{key}: {path} does not exist. {how_to_make(key, path)}")
    if not path.is_file():
        raise StartError(f"{key}: {path} is not a file. Name a file")
    if not os.access(path, os.R_OK):
        raise StartError(f"{key}: this user cannot read {path}. Change its permissions")


def _read_rows(source: SourceConfig, path: str) -> None:
    """Raise TaskFileError that names the line of the first wrong row."""
    if path.endswith(".parquet") or Path(path).stat().st_size > MAX_CHECKED_FILE_BYTES:
        # Readers of Parquet take seconds to import.
        return
    environment = environment_class(source.environment)
    TaskData(
        path,
        source.environment,
        environment,
        environment.Options.model_validate(source.options),
        columns=source.columns,
    )


def warn_about_sampling(config: RlConfig) -> None:
    """Warn if the log-probs of a run are not those of the sampled distribution.

    Log-probs of the truncated distribution would not help. Servers and trainer round differently, so a
    token may be in the truncated set of the server and not in that of the trainer. Its log-prob
    would then be -infinity.
    """
    if config.rollout.top_p < 1:
        logger.warning(
            "rollout.top_p=%g: tokens are sampled from the most likely %g of the probability "
            "mass, but log-probs, ratios and gradients are those of the whole distribution, "
            "which biases them. Set rollout.top_p=1, or lower rollout.temperature, which the "
            "trainer also applies",
            config.rollout.top_p,
            config.rollout.top_p,
        )


def warn_about_rollouts(config: RlConfig) -> None:
    """Warn about settings that leave servers waiting."""
    # nvidia-smi takes up to seconds, so call it only for engines that are checked.
    if not isinstance(config.rollout.engine, SglangConfig):
        return
    smallest = smallest_gpu()
    gigabytes = config.gpu_gb if smallest is None else smallest[1] / 1e9
    warnings = rollout_warnings(
        config.rollout, config.model, config.dtype, gigabytes, adapter=config.unmerged_adapter
    )
    for warning in warnings:
        logger.warning("%s", warning)


def check_rollouts(config: RunConfig, uses_engine: bool = True) -> None:
    """Check the sandbox and the engine's environment if they will run on this machine."""
    if not runs_here():
        return
    # Raises SandboxUnavailableError with the packages to install.
    check_isolation(config.sandbox)
    check_engine(config, uses_engine)


def check_engine(config: RunConfig, uses_engine: bool = True) -> None:
    """Check the engine's environment if it will run on this machine."""
    if uses_engine and runs_here():
        config.rollout.engine.check_machine()


def runs_here() -> bool:
    """Return True if workers will run on this machine, and not on the nodes of a cluster."""
    return not has_placement() and not os.environ.get("RAY_ADDRESS")


def check_tracking() -> None:
    """Check that enabled trackers are installed, and that MLflow's server answers."""
    # find_spec finds a package without importing it. An import would take seconds.
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is not None and importlib.util.find_spec("mlflow") is None:
        raise StartError(
            "MLFLOW_TRACKING_URI is set, but mlflow is not installed. Run pip install "
            "mlflow-skinny, or unset the variable"
        )
    if uri is not None and uri.startswith(("http://", "https://")):
        check_endpoint(uri, "MLFLOW_TRACKING_URI")
    for package in ("wandb", "trackio"):
        variable = f"{package.upper()}_PROJECT"
        if variable in os.environ and importlib.util.find_spec(package) is None:
            raise StartError(
                f"{variable} is set, but {package} is not installed. Run pip install {package}, or "
                "unset the variable"
            )


def store_need(config: RunConfig) -> StoreNeed:
    """Predict the contents of Ray's object store in the steps of a run."""
    if isinstance(config, RlConfig):
        return rl_store_need(
            config.model,
            config.dtype,
            config.rollout,
            config.algorithm,
            held_out=len(config.tasks.sources) * config.tasks.held_out_tasks,
        )
    assert isinstance(config, SftConfig)
    need = sft_store_need(
        sequences=config.sequences_per_step,
        longest=config.training.max_tokens_per_micro_batch,
    )
    if config.data is None or not config.samples:
        return need
    # The number of turns is known only after the conversations were read.
    turns = ASSUMED_TURNS * config.data.sampled_conversations * len(config.data.sources)
    sampled = evaluation_store_need(config.model, config.dtype, config.rollout, episodes=turns)
    return replace(
        need,
        columns=need.columns + sampled.columns,
        weights=WEIGHT_COPIES * sampled.weights,
        keys=[*need.keys, "data.sampled_conversations", "rollout.max_episode_tokens"],
    )


def evaluation_need(config: RunConfig, tasks: int) -> StoreNeed:
    """Predict the contents of Ray's object store in ``gptoss eval``.

    Args:
        config: configuration of the evaluation.
        tasks: number of held-out tasks, or of turns of conversations.
    """
    episodes = tasks * config.evaluation.samples_per_task
    return evaluation_store_need(config.model, config.dtype, config.rollout, episodes=episodes)
