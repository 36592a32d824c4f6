"""Which version of this project runs."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the installed version; ``unknown`` in a checkout that is on the path but not
    installed, where a run is no worse for it."""
    try:
        return version("megatron-gptoss")
    except PackageNotFoundError:
        return "unknown"
