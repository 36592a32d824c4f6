"""Names of Hugging Face hub data sets in configurations."""

PREFIX = "hub:"


def is_hub_dataset(location: str) -> bool:
    """Return True if ``location`` names a data set of the hub, and not a file."""
    return location.startswith(PREFIX)


def hub_name(location: str) -> tuple[list[str], str]:
    """Return ([name] or [name, configuration], split) for ``datasets.load_dataset``.

    Raises:
        ValueError: the form is neither ``hub:NAME:SPLIT`` nor ``hub:NAME:CONFIGURATION:SPLIT``.
    """
    *name, split = location.removeprefix(PREFIX).split(":")
    # An empty part comes from a missing name, such as in ``hub::train``.
    if len(name) not in (1, 2) or not all([*name, split]):
        raise ValueError(
            f"{location} is not the name of a data set. Use hub:NAME:SPLIT or "
            "hub:NAME:CONFIGURATION:SPLIT"
        )
    return name, split


def check_location(location: str | None) -> None:
    """Raise ValueError if the name has the prefix of hub data sets but not their form."""
    if location is not None and is_hub_dataset(location):
        hub_name(location)
