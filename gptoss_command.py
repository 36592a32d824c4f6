"""Entry point of the ``gptoss`` script, which makes sure that it imports this project's packages.

Directories in PYTHONPATH precede installed packages, so a user's ``launch.py`` there would hide the
package ``launch``. The name of this module is unlikely to be hidden.
"""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
"""Parent directory of the packages: a checkout, or the environment's site-packages."""

SHARED_PACKAGES = ("gptoss_kernels", "megatron_gptoss", "converters", "rl_loop")
"""Packages that the processes of a run import, too. Each process searches PYTHONPATH itself."""


def main() -> None:
    """Run the command line. Exit with status 1 and an error in one line if a package is hidden."""
    # Worker processes would import the hiding package, so loading ours here would not suffice.
    for name in SHARED_PACKAGES:
        hidden_by = other_place(name)
        if hidden_by is not None:
            print(
                f"gptoss: {hidden_by} hides megatron-gptoss's package {name}. Rename it, or remove "
                "its directory from PYTHONPATH",
                file=sys.stderr,
            )
            sys.exit(1)

    # Only this process imports ``launch``, so it can be loaded from its file.
    if other_place("launch") is not None:
        _import_ours("launch")

    from launch.cli import main as run_command_line

    run_command_line()


def other_place(name: str) -> Path | None:
    """Return the file that Python would import as a package; None if it is this project's."""
    # find_spec does not import the package, so the hiding file does not run.
    found = importlib.util.find_spec(name)
    if found is None:
        return None
    if found.origin is not None:
        place = Path(found.origin)
    else:
        place = Path(next(iter(found.submodule_search_locations or [name])))  # without __init__.py
    place = place.resolve()
    return None if place == _find_source(name) else place


def _find_source(name: str) -> Path:
    parent = HERE
    # A wheel has all packages next to each other.
    if name == "gptoss_kernels" and (HERE / "kernels" / name).is_dir():
        parent = HERE / "kernels"  # in a checkout
    return parent / name / "__init__.py"


def _import_ours(name: str) -> None:
    """Import the package next to this file, independent of PYTHONPATH."""
    source = _find_source(name)
    spec = importlib.util.spec_from_file_location(
        name, source, submodule_search_locations=[str(source.parent)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    # Before execution, because modules of the package import it.
    sys.modules[name] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
