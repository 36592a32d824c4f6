"""Classes and functions by name: how a configuration reaches code.

``policy_loss: ppo`` is a function of this project, ``policy_loss: my_losses:clipped`` one of the
user's own module."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

TAG = "type="
"""Prefix of the tags of unions that are chosen by a ``type``. pydantic puts tags into the location of
errors; messages to users leave them out."""


@dataclass(frozen=True)
class Registry[T]:
    """Maps the names that a configuration may give to classes or functions of one kind.

    Entries are fixed where the registry is defined. One added at run time would be missing
    in the processes of Ray and torch.distributed, which import everything anew. ``MODULE:NAME``
    works in all of them, provided that they can import the module."""

    kind: str
    """What the entries are, as error messages call it: "environment"."""
    expected: str
    """What an entry has to be: "a subclass of Environment"."""
    accepts: Callable[[object], bool]
    """Whether an imported object is of the right kind; see ``subclass_of`` and ``callable``."""
    entries: Mapping[str, T | str] = field(default_factory=dict)
    """Name -> object, or ``MODULE:NAME`` of what is imported only when somebody asks for it."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the known names."""
        return iter(self.entries)

    def __len__(self) -> int:
        """Count the known names."""
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        """Say whether a name is known, ``MODULE:NAME`` aside."""
        return name in self.entries

    def resolve(self, name: str) -> T:
        """Return the object of a known name, or import that of ``MODULE:NAME``.

        Raises ValueError for an unknown name, for a module that cannot be imported and for an
        object of another kind."""
        entry = self.entries.get(name, name)
        if not isinstance(entry, str):
            return entry
        if ":" not in entry:
            known = ", ".join(sorted(self.entries)) or "none"
            raise ValueError(
                f"there is no {self.kind} {name!r}; known: {known}, or give MODULE:NAME"
            )

        imported = self._import(entry)
        if not self.accepts(imported):
            raise ValueError(
                f"there is no {self.kind} {name!r}: {entry} is {_describe(imported)}, expected {self.expected}"
            )
        return imported  # type: ignore[return-value]  # ``accepts`` has looked at it

    def _import(self, path: str) -> object:
        """Import what ``MODULE:NAME`` stands for. Raises ValueError with the reason why that
        fails."""
        module_name, _, attribute = path.partition(":")
        failure = f"{self.kind} {path!r} cannot be imported"
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            failure = f"{failure}: {error}"
            if error.name == module_name.partition(".")[0]:
                failure += "; is its folder in PYTHONPATH?"
            raise ValueError(failure) from error
        except Exception as error:
            # Importing runs the module, so anything can go wrong in it, a syntax error included.
            raise ValueError(f"{failure}: {type(error).__name__}: {error}") from error

        if not hasattr(module, attribute):
            raise ValueError(f"{failure}: module {module_name!r} has no {attribute!r}")
        return getattr(module, attribute)


def subclass_of(base: type) -> Callable[[object], bool]:
    """Make the ``accepts`` of a registry whose entries are subclasses of ``base``."""
    return lambda candidate: isinstance(candidate, type) and issubclass(candidate, base)


def _describe(candidate: object) -> str:
    """Name what was imported: "the class Path", "the function join" or "of type int"."""
    if isinstance(candidate, type):
        return f"the class {candidate.__name__}"
    name = getattr(candidate, "__name__", None)
    if name is not None:
        return f"the {type(candidate).__name__} {name}"
    return f"of type {type(candidate).__name__}"
