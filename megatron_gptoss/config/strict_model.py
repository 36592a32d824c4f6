"""The base of all typed configuration."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Base of all configuration.

    Unknown keys are errors; fields are documented by the string under them.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)
