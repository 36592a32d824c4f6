"""Checks that weights to begin with, and checkpoints to go on from, are complete and of the
configured model."""

import json
from collections.abc import Callable
from pathlib import Path

from converters.errors import ConversionError
from converters.peft_settings import read_settings
from megatron_gptoss.checkpoint.directory import ADAPTER_FILE, MODEL_CONFIG_FILE
from megatron_gptoss.config import AdapterConfig, ModelConfig
from megatron_gptoss.families.registry import parse_model_config, read_hf_config
from megatron_gptoss.untrusted_files import is_plain_name
from rl_loop.config.errors import CannotStart
from rl_loop.tracking.run_directory import RunDirectory

PEFT_CONFIG_FILE = "adapter_config.json"
PEFT_WEIGHTS_FILE = "adapter_model.safetensors"
NOT_COMPARED = {"initializer_std", "max_length"}
"""Fields of a ModelConfig that say nothing about what the weights compute."""


def check_weights(key: str, path: Path, model: ModelConfig) -> None:
    """Raise CannotStart unless ``path`` holds the weights of ``model``.

    ``path``: a Hugging Face directory, a Megatron checkpoint or a run that has one. ``key`` is
    named in the error."""
    hf_config = path / "config.json"
    if hf_config.exists():
        _check_safetensors(key, path)
        if not _is_original_format(key, hf_config):
            _compare_models(key, hf_config, model, read_hf_config)
        return

    checkpoint = _checkpoint_of(path)
    if not (checkpoint / "metadata.json").exists():
        missing = "" if path.exists() else ": it does not exist"
        raise CannotStart(
            f"{key}: {path} is neither a Hugging Face directory (config.json), nor a Megatron checkpoint "
            f"(metadata.json), nor the directory of a run that has saved a checkpoint{missing}"
        )

    if (checkpoint / ADAPTER_FILE).exists():
        raise CannotStart(
            f"{key}: {checkpoint} holds adapters without their base: name the base, and these as initial_adapter; "
            f"or name a merged model, such as the export of that run (gptoss convert merge BASE {checkpoint} DIR)"
        )

    described = checkpoint / MODEL_CONFIG_FILE
    if described.exists():
        _compare_models(key, described, model, _read_model_config)


def check_initial_adapter(path: Path, adapter: AdapterConfig, model: ModelConfig) -> None:
    """Raise CannotStart unless ``path`` holds adapters of ``model`` with the settings ``adapter``.

    ``path``: a run directory, a checkpoint of adapters, or an adapter in PEFT's format, of which the
    trainer compares targets and tensors."""
    key = "initial_adapter"
    if (path / PEFT_CONFIG_FILE).exists():
        if not (path / PEFT_WEIGHTS_FILE).exists():
            raise CannotStart(f"{key}: {path} has no {PEFT_WEIGHTS_FILE}")
        _check_peft_settings(key, path / PEFT_CONFIG_FILE, adapter, model)
        return

    checkpoint = _checkpoint_of(path)
    if not (checkpoint / ADAPTER_FILE).exists():
        missing = "" if path.exists() else ": it does not exist"
        raise CannotStart(
            f"{key}: {path} is neither a run of adapters that has saved a checkpoint, nor a checkpoint of adapters "
            f"({ADAPTER_FILE}), nor an adapter in PEFT's format ({PEFT_CONFIG_FILE}){missing}"
        )

    _compare_models(key, checkpoint / MODEL_CONFIG_FILE, model, _read_model_config)
    try:
        settings = json.loads((checkpoint / ADAPTER_FILE).read_bytes())["settings"]
        difference = adapter.difference(AdapterConfig.model_validate(settings), model)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotStart(
            f"{key}: {checkpoint / ADAPTER_FILE} cannot be read ({error!r})"
        ) from None
    if difference is not None:
        setting, here, there = difference
        raise CannotStart(f"{key}: {checkpoint} has {setting} {there}, and this run {here}")


def _check_peft_settings(key: str, file: Path, adapter: AdapterConfig, model: ModelConfig) -> None:
    """Raise CannotStart if adapters in PEFT's format have other ranks or another alpha."""
    try:
        settings = read_settings(file)
    except ConversionError as error:
        raise CannotStart(f"{key}: {error}") from None

    if settings.alpha != adapter.alpha:
        raise CannotStart(
            f"{key}: {file} has lora_alpha {settings.alpha:g}, and this run adapter.alpha {adapter.alpha:g}"
        )
    for target in adapter.targets:
        kind: str = target
        rank = adapter.rank
        if target == "experts":
            kind = "gate_up"
            rank = adapter.rank_of_experts(model)
        if settings.rank_of(kind) != rank:
            raise CannotStart(
                f"{key}: {file} has rank {settings.rank_of(kind)} for {target}, and this run {rank}"
            )


def _checkpoint_of(path: Path) -> Path:
    """Return the newest checkpoint of a run directory; of another, the directory itself."""
    pointer = path / "checkpoints" / "latest"
    if pointer.exists():
        return path / "checkpoints" / pointer.read_text().strip()
    return path


def _read_model_config(file: Path) -> ModelConfig:
    return parse_model_config(file.read_bytes())


def check_newest_checkpoint(run: RunDirectory) -> None:
    """Raise CannotStart if the checkpoint that the run would go on from is incomplete."""
    for root in (run.checkpoints, run.critic_checkpoints):
        pointer = root / "latest"
        if not pointer.exists():
            continue
        newest = pointer.read_text().strip()
        if not (root / newest / "metadata.json").exists():
            raise CannotStart(
                f"{pointer} names {newest}, which is missing or incomplete; correct or delete the file"
            )


def _check_safetensors(key: str, path: Path) -> None:
    """Raise CannotStart if one of the directory's files of weights is missing."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        if not any(path.glob("model*.safetensors")):
            raise CannotStart(
                f"{key}: {path} has a config.json, but neither model.safetensors nor {index.name}"
            )
        return

    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()), key=str)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CannotStart(f"{key}: {index} cannot be read ({error!r})") from None
    outside = [file for file in files if not is_plain_name(file)]
    if outside:
        raise CannotStart(
            f"{key}: {index} names the file {outside[0]!r}, which is not in its directory"
        )
    missing = [file for file in files if not (path / file).exists()]
    if missing:
        raise CannotStart(
            f"{key}: {path} lacks {missing[0]} ({len(missing)} of {len(files)} files); download it again"
        )


def _is_original_format(key: str, hf_config: Path) -> bool:
    """Whether the file is OpenAI's, whose keys are other ones. The trainer compares the shapes of
    its tensors."""
    try:
        return "model_type" not in json.loads(hf_config.read_bytes())
    except (OSError, ValueError) as error:
        raise _not_described(key, hf_config, error) from None


def _compare_models(
    key: str, file: Path, model: ModelConfig, read: Callable[[Path], ModelConfig]
) -> None:
    """Raise CannotStart if ``file`` describes another model than ``model``."""
    try:
        theirs = read(file).model_dump()
    except (OSError, ValueError) as error:
        raise _not_described(key, file, error) from None

    ours = model.model_dump(exclude=NOT_COMPARED)
    different = [
        f"{name} is {theirs.get(name)} there and {value} here"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if different:
        raise CannotStart(
            f"{key}: {file.parent} is another model than the configuration's: {', '.join(different)}"
        )


def _not_described(key: str, file: Path, error: Exception) -> CannotStart:
    first_line = str(error).strip().splitlines()[0]
    return CannotStart(f"{key}: {file} does not describe a model: {first_line}")
