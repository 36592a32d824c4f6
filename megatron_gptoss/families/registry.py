"""Registry of model families by the ``model_type`` of Hugging Face. Does not import torch."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, TypeAdapter, ValidationError

from megatron_gptoss.config import ModelConfig, load_hf_config
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig, openai_config

FAMILIES: tuple[type[ModelConfig], ...] = (GptOssModelConfig, DenseModelConfig)
"""All families. Register the layers of a new family in ``layer_registry``, and its tensors in
``converters.families.registry``.
"""

DEFAULT_FAMILY = "gpt_oss"
"""Family of configurations and checkpoints without model_type."""

_BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.hf_model_types}


def known_family(model_type: object) -> type[ModelConfig] | None:
    """Return the configuration class of a ``model_type``; None if there is none."""
    return _BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None


def parse_family(model_type: object, where: str) -> type[ModelConfig]:
    """Return the configuration class of a ``model_type``.

    Args:
        model_type: value of the key.
        where: name of the file or section in errors.

    Raises:
        ValueError: the value is unknown. The message lists the known values.
    """
    family = known_family(model_type)
    if family is not None:
        return family
    known = ", ".join(_BY_MODEL_TYPE)
    raise ValueError(f"{where}: model_type is {model_type!r}, expected one of {known}")


def read_hf_config(source: Path | str | dict[str, Any]) -> ModelConfig:
    """Read a ``config.json`` of any family, or of OpenAI's original releases of GPT-OSS.

    The original releases have other keys and no model_type.

    Args:
        source: a file, its directory, or the parsed content.

    Raises:
        ValueError: a key is missing or unsupported. The message names file and key.
    """
    raw, where = load_hf_config(source)
    # OpenAI's own format has this key, and Hugging Face's has num_local_experts.
    if "num_experts" in raw and "model_type" not in raw:
        raw = openai_config(raw, where)
    return parse_family(raw.get("model_type"), where).from_hf_dict(raw, where)


def model_config(fields: Any) -> Any:
    """Return the configuration with these fields, of the family that model_type names.

    Values other than a dict are returned unchanged, and pydantic rejects them.
    """
    if not isinstance(fields, dict):
        return fields
    model_type = fields.get("model_type", DEFAULT_FAMILY)
    return parse_family(model_type, "model").model_validate(fields)


AnyModelConfig = Annotated[SerializeAsAny[ModelConfig], BeforeValidator(model_config)]
"""Type of a field for the configuration of any family."""


def parse_model_config(text: str | bytes) -> ModelConfig:
    """Parse the JSON of ``model_dump_json``, for any family.

    Raises:
        ValueError: a key is wrong. The message names it.
    """
    adapter: TypeAdapter[ModelConfig] = TypeAdapter(AnyModelConfig)
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{key}: {message}" if key else message) from None
