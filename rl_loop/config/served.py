"""Reads the configuration of a model to serve or to evaluate: of its run, or of its directory."""

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_gptoss.families.registry import read_hf_config
from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import load_run_config, read_yaml, validated
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.config.shipped import find_config
from rl_loop.config.suggestions import similar_names
from rl_loop.served_weights import choose_served_weights


def load_served_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read the argument of ``gptoss serve`` with ``load_config``.

    ``initial_weights`` of the result is the directory of the weights to serve. For a run,
    ``choose_served_weights`` chooses it.

    Args:
        path: a configuration of ``gptoss rl`` or ``sft``, the directory of a run, or a Hugging Face
            directory, whose model is served with the default settings of its family.
        overrides: ``key.sub=value`` each.

    Raises:
        ConfigError: the message names file and keys.
    """
    # A path that does not exist may be the name of a shipped configuration.
    if path.is_file() or not path.exists():
        return _load_either(_find_either(path), overrides)

    if (path / "config.yaml").exists():
        weights = choose_served_weights(path).path
        # Overrides come last, so that ``initial_weights=...`` of the user wins.
        return _load_either(
            path / "config.yaml", [f"initial_weights={weights}", *(overrides or [])]
        )

    if not (path / "config.json").exists():
        raise ConfigError(
            f"{path} is neither a run (config.yaml) nor a Hugging Face directory (config.json). "
            "Name one of them"
        )
    return _config_of_model(path, overrides or [])


def load_evaluated_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a configuration of ``gptoss rl`` or ``gptoss sft`` with ``load_config``."""
    return _load_either(_find_either(path), overrides)


def _find_either(path: Path) -> Path:
    """Return the file of a configuration of either command. Among shipped names, rl comes first."""
    for command in (RlConfig.command, SftConfig.command):
        file = find_config(path, command)
        if file.exists():
            return file
    raise ConfigError(f"{path}: no such file{similar_names(path.stem, RlConfig.command)}")


def _load_either(path: Path, overrides: list[str] | None) -> RunConfig:
    """Read a configuration of ``gptoss rl`` or of ``gptoss sft``."""
    # No key of ``gptoss sft`` is required, so any key that only it has decides.
    keys_of_sft = set(SftConfig.model_fields) - set(RlConfig.model_fields)
    is_sft = bool(keys_of_sft & set(read_yaml(path)))
    return load_run_config(path, "sft" if is_sft else "rl", overrides)


def _config_of_model(path: Path, overrides: list[str]) -> RunConfig:
    """Return the configuration for a Hugging Face directory."""
    try:
        model = read_hf_config(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None

    tree = {
        "name": "serve",
        "model": model.model_dump(mode="json"),
        "initial_weights": str(path),
        # A server accepts requests up to the model's length. The micro-batch must not be shorter,
        # although a server trains nothing.
        "rollout": {"max_episode_tokens": model.max_length},
        "training": {"max_tokens_per_micro_batch": model.max_length},
    }
    try:
        merged = OmegaConf.merge(OmegaConf.create(tree), OmegaConf.from_dotlist(overrides))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    return validated(path, RlConfig, OmegaConf.to_container(merged, resolve=True))
