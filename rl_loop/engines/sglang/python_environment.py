"""Python environment of SGLang servers, which differs from the environment of this process."""

import os
import subprocess
from collections.abc import Mapping


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without its Python paths.

    Servers may run in another Python environment, and these paths would hide its packages.
    """
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    return environment


def can_import(python: str, module: str, environment: Mapping[str, str]) -> bool:
    """Return True if an interpreter finds a module.

    Args:
        python: path of the interpreter.
        module: name of the module.
        environment: environment variables of the interpreter.
    """
    # ``find_spec`` does not import SGLang, which takes many seconds.
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    finding = subprocess.run(
        [python, "-c", find],
        env=dict(environment),
        capture_output=True,
        timeout=60,
        check=False,
    )
    return finding.returncode == 0
