"""Checks of MXFP4 options against the model."""

from megatron_gptoss.config.model import ModelConfig, Quantization


def check_quantization(key: str, quantization: Quantization | None, model: ModelConfig) -> None:
    """Check that the experts of a model can have values of a format.

    Args:
        key: configuration key, for the message.
        quantization: value of the key.
        model: architecture.

    Raises:
        ValueError: if the model has no experts, or widths that blocks of MXFP4 do not fit.
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
