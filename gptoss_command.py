"""The ``gptoss`` script's entry: makes sure that the packages it imports are this project's.

A folder in PYTHONPATH comes before installed packages, so a user's ``launch.py`` there would hide the
package ``launch``. This module lies beside the packages, and its own name is one that nobody else has."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
"""Where the packages are: a checkout, or the environment's site-packages."""

SHARED_PACKAGES = ("gptoss_kernels", "megatron_gptoss", "converters", "rl_loop")
"""Also imported by the processes of a run, each of which looks through PYTHONPATH itself."""


def main() -> None:
    """Run the command line. Exits with 1 and one line if something hides a package."""
    for name in SHARED_PACKAGES:
        hidden_by = other_place(name)
        if hidden_by is not None:
            print(
                f"gptoss: {hidden_by} hides megatron-gptoss's package {name}: rename it, or take "
                "its folder out of PYTHONPATH",
                file=sys.stderr,
            )
            sys.exit(1)

    # Only the command itself imports this one, so it can be told which is meant.
    if other_place("launch") is not None:
        _import_ours("launch")

    from launch.cli import main as run_command_line

    run_command_line()


def other_place(name: str) -> Path | None:
    """Return what Python would import as package ``name`` if it is not this project's."""
    found = importlib.util.find_spec(name)
    if found is None:
        return None
    if found.origin is not None:
        place = Path(found.origin)
    else:
        place = Path(next(iter(found.submodule_search_locations or [name])))  # without __init__.py
    place = place.resolve()
    return None if place == _source_of(name) else place


def _source_of(name: str) -> Path:
    parent = HERE
    if name == "gptoss_kernels" and (HERE / "kernels" / name).is_dir():
        parent = HERE / "kernels"  # of a checkout
    return parent / name / "__init__.py"


def _import_ours(name: str) -> None:
    """Import the package from beside this file, whatever PYTHONPATH says."""
    source = _source_of(name)
    spec = importlib.util.spec_from_file_location(
        name, source, submodule_search_locations=[str(source.parent)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
