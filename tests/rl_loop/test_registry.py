"""Names in a configuration become classes and functions, or an error with a remedy."""

from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

from rl_loop.registry import Registry, accept_subclasses

PATHS: Registry[type[PurePath]] = Registry(
    kind="path",
    expected="a subclass of PurePath",
    accepts=accept_subclasses(PurePath),
    entries={"plain": PurePath, "on_demand": "pathlib:Path", "misfiled": "decimal:Decimal"},
)
FUNCTIONS: Registry[Callable] = Registry(kind="function", expected="a function", accepts=callable)


def test_known_names_give_objects_and_import_on_demand() -> None:
    assert PATHS.resolve("plain") is PurePath
    assert PATHS.resolve("on_demand") is Path
    assert list(PATHS) == ["plain", "on_demand", "misfiled"]
    assert "plain" in PATHS
    assert "pathlib:Path" not in PATHS


def test_objects_of_other_modules_resolve_by_module_and_name() -> None:
    assert PATHS.resolve("pathlib:PosixPath").__name__ == "PosixPath"
    assert FUNCTIONS.resolve("textwrap:dedent")("  a") == "a"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "windows",
            "there is no path 'windows'. Known names: misfiled, on_demand, plain. For your own, write MODULE:NAME",
        ),
        (
            "nowhere:X",
            r"path 'nowhere:X' cannot be imported: No module named 'nowhere'. Is its directory in PYTHONPATH",
        ),
        (
            "pathlib:Nothing",
            "path 'pathlib:Nothing' cannot be imported: module 'pathlib' has no 'Nothing'",
        ),
        ("pathlib:", "path 'pathlib:' cannot be imported: module 'pathlib' has no ''"),
        (":Path", "path ':Path' cannot be imported: ValueError: Empty module name"),
        (
            "decimal:Decimal",
            "'decimal:Decimal': decimal:Decimal is the class Decimal, expected a subclass of PurePath",
        ),
        ("os.path:join", "os.path:join is the function join, expected a subclass of PurePath"),
        ("os:sep", "os:sep is of type str, expected a subclass of PurePath"),
        ("misfiled", "there is no path 'misfiled': decimal:Decimal is the class Decimal"),
    ],
)
def test_wrong_name_is_rejected_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PATHS.resolve(name)


def test_module_that_fails_to_import_is_rejected_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_another.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "does_not_parse.py").write_text("def f(:\n")

    with pytest.raises(
        ValueError, match=r"cannot be imported: No module named 'nowhere_to_be_found'$"
    ):
        FUNCTIONS.resolve("needs_another:f")
    with pytest.raises(ValueError, match="cannot be imported: SyntaxError: "):
        FUNCTIONS.resolve("does_not_parse:f")
