"""Names of the Hugging Face hub's data sets in configurations."""

PREFIX = "hub:"


def is_of_hub(place: str) -> bool:
    """Whether data is a data set of the hub rather than a file."""
    return place.startswith(PREFIX)


def hub_name(place: str) -> tuple[list[str], str]:
    """Return what ``datasets.load_dataset`` takes: name and configuration, if there is one, and the split.

    Raises ValueError for what has another form than ``hub:NAME:SPLIT`` and
    ``hub:NAME:CONFIGURATION:SPLIT``."""
    *name, split = place.removeprefix(PREFIX).split(":")
    if len(name) not in (1, 2) or not all([*name, split]):
        raise ValueError(f"{place}: give hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT")
    return name, split


def check_place(place: str | None) -> None:
    """Raise ValueError if data is named as one of the hub's and has not the form of one."""
    if place is not None and is_of_hub(place):
        hub_name(place)
