"""Checks that initial weights, and checkpoints for a resume, are complete and fit the model."""

import math
from collections.abc import Callable
from pathlib import Path

from converters.errors import ConversionError
from converters.model_extras import read_object
from converters.peft_settings import PEFT_CONFIG_FILE, read_settings
from converters.weight_files import INDEX_FILE, read_index, weight_files
from megatron_gptoss.checkpoint.directory import ADAPTER_FILE, MODEL_CONFIG_FILE
from megatron_gptoss.config import AdapterConfig, ModelConfig
from megatron_gptoss.families.registry import parse_model_config, read_hf_config
from megatron_gptoss.untrusted_files import read_bytes, read_json
from rl_loop.config.errors import ConfigError, StartError
from rl_loop.config.every_run import RunConfig
from rl_loop.lifecycle.error_hints import how_to_make, how_to_make_weights
from rl_loop.tracking.run_directory import RunDirectory

PEFT_WEIGHTS_FILE = "adapter_model.safetensors"
NOT_COMPARED = {"initializer_std", "max_length"}
"""Fields of a ModelConfig that do not affect the computation of the weights."""


def check_weights(key: str, path: Path, model: ModelConfig) -> None:
    """Check that a path has the weights of the configured model.

    Args:
        key: configuration key, for the message.
        path: a Hugging Face directory, a Megatron checkpoint or a run that has one.
        model: the configured architecture.

    Raises:
        StartError: the weights are missing, incomplete or of a different model.
    """
    # A Hugging Face directory has this file. Megatron checkpoints have others.
    hf_config = path / "config.json"
    if hf_config.exists():
        _check_safetensors(key, path)
        if not _is_original_format(key, hf_config):
            _compare_models(key, hf_config, model, read_hf_config)
        return

    if not path.exists():
        raise StartError(f"{key}: {path} does not exist. {how_to_make_weights(path)}")
    checkpoint = _find_checkpoint(path)
    if not (checkpoint / "metadata.json").exists():
        raise StartError(
            f"{key}: {path} is neither a Hugging Face directory (config.json), nor a Megatron checkpoint "
            "(metadata.json), nor the directory of a run that has saved a checkpoint. "
            f"{how_to_make_weights(path)}"
        )

    # A checkpoint of adapters alone would leave the base at random values.
    if (checkpoint / ADAPTER_FILE).exists():
        raise StartError(
            f"{key}: {checkpoint} has adapters without their base model. Set initial_weights to "
            "the base and initial_adapter to the adapters, or name a merged model, such as the "
            f"export of that run (gptoss convert merge BASE {checkpoint} DIR)"
        )

    config_file = checkpoint / MODEL_CONFIG_FILE
    if config_file.exists():
        _compare_models(key, config_file, model, _read_model_config)


def check_initial_adapter(path: Path, adapter: AdapterConfig, model: ModelConfig) -> None:
    """Check that a path has adapters of the configured model with the configured settings.

    Args:
        path: a run directory, a checkpoint of adapters, or an adapter in PEFT's format. Targets and
            tensors of the latter are compared by the trainer.
        adapter: the configured settings.
        model: the configured architecture.

    Raises:
        StartError: the adapters are missing, of a different model, or have different settings.
    """
    key = "initial_adapter"
    if (path / PEFT_CONFIG_FILE).exists():
        if not (path / PEFT_WEIGHTS_FILE).exists():
            raise StartError(f"{key}: {path} has no {PEFT_WEIGHTS_FILE}. Copy the whole adapter")
        _check_peft_settings(key, path / PEFT_CONFIG_FILE, adapter, model)
        return

    if not path.exists():
        raise StartError(f"{key}: {path} does not exist. {how_to_make(key, path)}")
    checkpoint = _find_checkpoint(path)
    if not (checkpoint / ADAPTER_FILE).exists():
        raise StartError(
            f"{key}: {path} is neither a run of adapters that has saved a checkpoint, nor a checkpoint of adapters "
            f"({ADAPTER_FILE}), nor an adapter in PEFT's format ({PEFT_CONFIG_FILE}). {how_to_make(key, path)}"
        )

    _compare_models(key, checkpoint / MODEL_CONFIG_FILE, model, _read_model_config)
    try:
        settings = read_json(checkpoint / ADAPTER_FILE)["settings"]
        difference = adapter.difference(AdapterConfig.model_validate(settings), model)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartError(f"{key}: {checkpoint / ADAPTER_FILE} cannot be read ({error!r})") from None
    if difference is not None:
        setting, configured, saved = difference
        raise StartError(
            f"{key}: {checkpoint} has {setting} {saved}, but the configuration has {configured}. Use "
            "the setting of the adapters"
        )


def _check_peft_settings(key: str, file: Path, adapter: AdapterConfig, model: ModelConfig) -> None:
    """Raise StartError if adapters in PEFT's format have other ranks or another alpha."""
    try:
        settings = read_settings(file)
    except ConversionError as error:
        raise StartError(f"{key}: {error}") from None

    for target in adapter.targets:
        kind: str = target
        rank = adapter.rank
        # PEFT has one entry per matrix. Both matrices of the experts have one rank in this project.
        if target == "experts":
            kind = "gate_up"
            rank = adapter.rank_of_experts(model)
        if settings.find_rank(kind) != rank:
            raise StartError(
                f"{key}: {file} has rank {settings.find_rank(kind)} for {target}, but the "
                f"configuration has {rank}. Use the rank of the adapters"
            )
        # Both are quotients of floats, which may differ in the last digit.
        if not math.isclose(settings.compute_scale(kind), adapter.alpha / rank, rel_tol=1e-12):
            raise StartError(
                f"{key}: {file} scales {target} like lora_alpha "
                f"{settings.compute_scale(kind) * rank:g}, but the configuration has adapter.alpha "
                f"{adapter.alpha:g}. Use the value of the adapters"
            )


def _find_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint of a run directory, or other directories unchanged."""
    pointer = path / "checkpoints" / "latest"
    if pointer.exists():
        return path / "checkpoints" / _latest_name(pointer)
    return path


def _latest_name(pointer: Path) -> str:
    """Return the name of the checkpoint in the file ``latest``."""
    # A damaged file then names a directory that does not exist, and the caller reports it.
    return read_bytes(pointer).decode(errors="replace").strip()


def _read_model_config(file: Path) -> ModelConfig:
    return parse_model_config(read_bytes(file))


def check_newest_checkpoint(run: RunDirectory) -> None:
    """Raise StartError if the checkpoint from which the run would continue is incomplete."""
    # PPO saves policy and critic separately, and a resume needs both.
    for root in (run.checkpoints, run.critic_checkpoints):
        pointer = root / "latest"
        if not pointer.exists():
            continue
        newest = _latest_name(pointer)
        if not (root / newest / "metadata.json").exists():
            raise StartError(
                f"{pointer} names {newest}, which is missing or incomplete. Correct or delete "
                "the file"
            )


def _check_safetensors(key: str, path: Path) -> None:
    """Raise StartError if a file of weights is missing, or there is a second set of weights."""
    # A model in one file has no index.
    has_index = (path / INDEX_FILE).exists()
    if not has_index and not any(path.glob("model*.safetensors")):
        raise StartError(
            f"{key}: {path} has a config.json, but neither model.safetensors nor {INDEX_FILE}. "
            f"{how_to_make_weights(path)}"
        )

    try:
        weight_files(path, read_index(path))
    except ConversionError as error:
        raise StartError(f"{key}: {error}") from None


def _is_original_format(key: str, hf_config: Path) -> bool:
    """Return True if the file has OpenAI's format, with other keys.

    The trainer then compares the shapes of its tensors.
    """
    try:
        return "model_type" not in read_object(hf_config)
    except ConversionError as error:
        raise StartError(f"{key}: {error}") from None


def _compare_models(
    key: str, file: Path, model: ModelConfig, read: Callable[[Path], ModelConfig]
) -> None:
    """Raise StartError if ``file`` describes a different model than ``model``."""
    try:
        theirs = read(file).model_dump()
    except (OSError, ValueError) as error:
        raise _not_described(key, file, error) from None

    # Compared field by field, so that the message can name all differences.
    ours = model.model_dump(exclude=NOT_COMPARED)
    differences = [
        f"{name} is {theirs.get(name)} there, but {value} in `model`"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if differences:
        raise StartError(
            f"{key}: {file.parent} is a different model: {', '.join(differences)}. Change `model` "
            "or the path"
        )


def _not_described(key: str, file: Path, error: Exception) -> StartError:
    first_line = str(error).strip().splitlines()[0]
    return StartError(f"{key}: {file} has no valid model configuration ({first_line})")


def check_loads_merged_weights(config: RunConfig) -> None:
    """Refuse servers for unmerged adapters in commands that load a merged export.

    Raises:
        ConfigError: such servers would round merged weights to MXFP4.
    """
    if config.unmerged_adapter is not None and config.rollout.engine.has_mxfp4_experts:
        raise ConfigError(
            "adapter.merge_experts (false): evaluation and serving load the merged export, which servers with "
            f"rollout.engine.quantization={config.rollout.engine.experts_format} would round. Add "
            "adapter.merge_experts=true rollout.engine.quantization=null"
        )
