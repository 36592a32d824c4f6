"""Registries of classes and functions that a configuration refers to by a name.

``policy_loss: ppo`` is a function of this project. ``policy_loss: my_losses:clipped`` is a function
of the user's module.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TAG = "type="
"""Prefix of the tags of unions that are chosen by a ``type``. pydantic puts tags into the location
of errors. Messages to users leave them out."""
CHECKOUT = Path(__file__).resolve().parents[1]
"""Parent directory of this project's packages. In a checkout it contains ``examples``."""


@dataclass(frozen=True)
class Registry[T]:
    """Maps names in a configuration to classes or functions of one kind.

    Entries are fixed where the registry is defined. An entry that is added at run time would be
    missing in the processes of Ray and torch.distributed, which import all modules again.
    ``MODULE:NAME`` works in all of these processes if they can import the module.
    """

    kind: str
    """Kind of the entries, as in error messages: "environment"."""
    expected: str
    """Requirement for an entry, as in error messages: "a subclass of Environment"."""
    accepts: Callable[[object], bool]
    """Returns True if an imported object is of the right kind, such as
    ``accept_subclasses(Environment)``."""
    entries: Mapping[str, T | str] = field(default_factory=dict)
    """Name -> object, or name -> ``MODULE:NAME`` of an object that is imported on first use."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the known names."""
        return iter(self.entries)

    def __len__(self) -> int:
        """Count the known names."""
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        """Return True if the name is known. ``MODULE:NAME`` is not a known name."""
        return name in self.entries

    def resolve(self, name: str) -> T:
        """Return the object of a known name, or import the object ``MODULE:NAME``.

        Raises:
            ValueError: the name is unknown, the module cannot be imported, or the object is of
                another kind.
        """
        entry = self.entries.get(name, name)
        if not isinstance(entry, str):
            return entry
        if ":" not in entry:
            known = ", ".join(sorted(self.entries)) or "none"
            raise ValueError(
                f"there is no {self.kind} {name!r}. Known names: {known}. For your own, write "
                "MODULE:NAME"
            )

        imported = self._import(entry)
        if not self.accepts(imported):
            raise ValueError(
                f"there is no {self.kind} {name!r}: {entry} is {_describe(imported)}, expected "
                f"{self.expected}"
            )
        return imported  # type: ignore[return-value]  # ``accepts`` has looked at it

    def _import(self, path: str) -> object:
        """Import the object ``MODULE:NAME``. Raises ValueError with the reason if that fails."""
        module_name, _, attribute = path.partition(":")
        _find_examples(module_name)
        failure = f"{self.kind} {path!r} cannot be imported"
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            failure = f"{failure}: {error}"
            # The module itself may be found and then fail to import another one, which is no
            # question of paths.
            if error.name == module_name.partition(".")[0]:
                failure += ". Is its directory in PYTHONPATH?"
            raise ValueError(failure) from error
        except Exception as error:
            # Importing runs the module, which may raise any exception, such as a SyntaxError.
            raise ValueError(f"{failure}: {type(error).__name__}: {error}") from error

        if not hasattr(module, attribute):
            raise ValueError(f"{failure}: module {module_name!r} has no {attribute!r}")
        return getattr(module, attribute)


def _find_examples(module_name: str) -> None:
    """Let Python find the examples of the checkout, which an editable installation leaves out."""
    is_example = module_name.partition(".")[0] == "examples"
    # At the end, so that a directory of the user that is also called examples comes first.
    if is_example and str(CHECKOUT) not in sys.path and (CHECKOUT / "examples").is_dir():
        sys.path.append(str(CHECKOUT))


def accept_subclasses(base: type) -> Callable[[object], bool]:
    """Return the ``accepts`` of a registry whose entries are subclasses of ``base``."""
    return lambda candidate: isinstance(candidate, type) and issubclass(candidate, base)


def _describe(candidate: object) -> str:
    """Return "the class Path", "the function join" or "of type int" for an imported object."""
    if isinstance(candidate, type):
        return f"the class {candidate.__name__}"
    name = getattr(candidate, "__name__", None)
    if name is not None:
        return f"the {type(candidate).__name__} {name}"
    return f"of type {type(candidate).__name__}"
