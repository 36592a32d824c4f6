"""Optional dependencies of this project, and the commands that install them."""

from pathlib import Path

from megatron_gptoss.user_error import UserError


class MissingExtraError(UserError):
    """A package of an optional dependency is not installed. The message has the install command."""

    def __init__(self, user: str, extra: str, error: ImportError) -> None:
        super().__init__(f"{user}: {error}. Run `{install_command(extra)}`")


def install_command(extra: str, options: str = "") -> str:
    """Return the command that installs an extra.

    Args:
        extra: name of the extra in pyproject.toml.
        options: further options of pip, with a blank at the end.
    """
    # From the checkout or the wheel, because the project is not on a package index.
    root = Path(__file__).resolve().parents[1]
    # An installed wheel has no pyproject.toml next to its packages, so the file marks a checkout.
    if (root / "pyproject.toml").exists():
        return f"pip install {options}-e '{root}[{extra}]'"
    return f'pip install {options}"$(ls megatron_gptoss-*.whl)[{extra}]"'
