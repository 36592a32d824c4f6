"""Base class of all typed configuration."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Base class of all configuration.

    Unknown keys are errors. The string after a field is its documentation.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)
