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
            f"{key} is {quantization}, a format of experts, but a {model.model_type} model has no "
            "experts. Set it to null"
        )
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(model, name)
        if size % 32:
            raise ValueError(
                f"{key} is {quantization}, which needs a multiple of 32 as {name}, but {name} is {size}. "
                f"Set {key} to null"
            )
