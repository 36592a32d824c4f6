"""Version of this project."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the installed version; "unknown" for a checkout that is not installed."""
    # The version is only for logs and files, so a missing one must not stop a run.
    try:
        return version("megatron-gptoss")
    except PackageNotFoundError:
        return "unknown"
