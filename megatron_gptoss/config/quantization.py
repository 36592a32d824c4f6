"""Checks of MXFP4 options against the model."""

from megatron_gptoss.config.adapter import AdapterConfig
from megatron_gptoss.config.model import ModelConfig, Quantization


def check_quantization(
    quantization: Quantization | None, model: ModelConfig, adapter: AdapterConfig | None
) -> None:
    """Raise ValueError if the configuration does not allow quantization-aware training.

    The message names the key.

    Args:
        quantization: number format; None for no quantization.
        model: architecture.
        adapter: adapters; None if all parameters are trained.
    """
    if quantization is None:
        return
    if adapter is not None:
        raise ValueError(
            f"quantization {quantization} trains all weights, and adapter freezes them: an expert "
            "merged with its adapter is no value that four bits hold. Leave one of them out; "
            "parallel.base mxfp4 is for a frozen base in four bits"
        )
    check_blocks("quantization", quantization, model)


def check_blocks(key: str, quantization: Quantization | None, model: ModelConfig) -> None:
    """Raise ValueError if experts of ``model`` cannot have MXFP4 weights.

    Args:
        key: configuration key that requests the format.
        quantization: number format; None for no quantization.
        model: architecture.
    """
    if quantization is None:
        return
    if quantization not in model.quantizations:
        raise ValueError(
            f"{key} {quantization}: a {model.model_type} model has no experts to hold it"
        )
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(model, name)
        if size % 32:
            raise ValueError(
                f"{key} {quantization} needs {name} ({size}) to be a multiple of 32, the values "
                "that share a scale"
            )
