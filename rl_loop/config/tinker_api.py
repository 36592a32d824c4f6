"""Settings of the Tinker API: the model as clients see it, and limits of clients."""

from pydantic import Field

from megatron_gptoss.config import StrictModel


class ApiConfig(StrictModel):
    """Model as clients see it, and limits of clients."""

    base_model: str = Field("openai/gpt-oss-20b", min_length=1, max_length=128)
    """Name of the base for clients. tinker-cookbook chooses renderers and learning rates by it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample whose request has no ``stop``. For the released models 200002 and
    200012 (``<|return|>`` and ``<|call|>``)."""
    max_models: int = Field(8, ge=1)
    """Maximum number of models in training. Each needs host memory for factors, optimizer state and
    gradient (docs/tinker.md)."""
    turn_tokens: int = Field(65536, ge=1)
    """Tokens after which another model's turn begins. Larger passes are cut into parts."""
    snapshots_per_model: int = Field(16, ge=1)
    """Number of snapshots without a name that are kept for sampling, the newest of each model."""
    checkpoint_gigabytes: float = Field(100.0, gt=0)
    """Maximum size in GB of the checkpoints of one key."""
