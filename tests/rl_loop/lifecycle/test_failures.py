"""One-line reports of failures: the actor's exception, and the file with the traceback."""

from __future__ import annotations

import errno
import pickle
import re
import sys
import traceback
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from converters.errors import ConversionError
from megatron_gptoss.user_error import UserError
from rl_loop.config.errors import ConfigError
from rl_loop.engines.completions import EndpointError
from rl_loop.lifecycle.failures import describe_cause, explain, last_exception
from rl_loop.tracking.run_directory import RunWriteError


def raised(error: Exception) -> tuple[Exception, str]:
    """Raise ``error`` while another error is handled. Return it and its traceback."""
    try:
        try:
            {}["inner"]
        except KeyError:
            raise error from None
    except Exception as caught:
        return caught, traceback.format_exc()


def actor_error(error: Exception) -> RayTaskError:
    cause, text = raised(error)
    return RayTaskError(
        "Worker.step", text, cause, proctitle="ray::Worker.step", pid=7, ip="10.0.0.2"
    )


def constructor_error(error: Exception) -> ActorDiedError:
    return ActorDiedError(actor_error(error))


@pytest.mark.parametrize(
    "through", [lambda e: actor_error(e).as_instanceof_cause(), actor_error, constructor_error]
)
def test_exception_of_an_actor_is_reported_on_one_line(through: object, tmp_path: Path) -> None:
    error = through(ZeroDivisionError("a reward was divided\nby the number of its parts"))  # type: ignore[operator]
    error.add_note("first on trainer rank 3 on n2 (pid 7)")
    line = explain(error, tmp_path)
    assert line == (
        "ZeroDivisionError: a reward was divided by the number of its parts (first on trainer rank 3 on n2 (pid 7)). "
        f"The traceback is in {tmp_path}/error.log"
    )
    log = (tmp_path / "error.log").read_text()
    assert "ray::Worker.step()" in log
    assert f'File "{__file__}"' in log


@pytest.mark.parametrize(
    "through", [lambda e: actor_error(e).as_instanceof_cause(), constructor_error]
)
def test_user_error_is_reported_without_its_class(through: object, tmp_path: Path) -> None:
    line = explain(through(ConversionError("models/x: no config.json")), tmp_path)  # type: ignore[operator]
    assert line == f"models/x: no config.json. The traceback is in {tmp_path}/error.log"
    assert explain(ConfigError("a:\n  b: wrong"), tmp_path) == "a:\n  b: wrong"


def test_user_error_of_an_unimported_class_is_recognized_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For errors in constructors Ray keeps only text. The driver may not know the class."""
    died = constructor_error(EndpointError("http://x cannot be used"))
    monkeypatch.delitem(sys.modules, "rl_loop.engines.completions")
    assert (
        explain(died, tmp_path)
        == f"http://x cannot be used. The traceback is in {tmp_path}/error.log"
    )


def test_pickled_write_error_keeps_message_errno_and_bases() -> None:
    error = pickle.loads(pickle.dumps(RunWriteError(errno.ENOSPC, "could not write x")))
    assert isinstance(error, UserError)
    assert (str(error), error.errno) == ("could not write x", errno.ENOSPC)


def test_cause_nested_in_two_actor_errors_is_found() -> None:
    """A rollout worker passes on such an error of a server's actor."""
    outer = actor_error(actor_error(ValueError("no such token")))
    assert describe_cause(outer).kind == "ValueError"
    assert describe_cause(outer).message == "no such token"


def test_traceback_is_in_a_temporary_file_without_a_directory(tmp_path: Path) -> None:
    error, _ = raised(RuntimeError("unknown"))
    for directory in (None, tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        found = re.fullmatch(
            r"RuntimeError: unknown\. The traceback is in (\S+)", explain(error, directory)
        )
        assert found
        assert "RuntimeError: unknown" in Path(found[1]).read_text()
        Path(found[1]).unlink()


def test_log_contains_both_of_two_failures(tmp_path: Path) -> None:
    for text in ("first", "second"):
        explain(raised(RuntimeError(text))[0], tmp_path)
    assert (tmp_path / "error.log").read_text().count("Traceback") == 2


def test_last_exception_of_a_traceback_is_found_below_markers() -> None:
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nKeyError: 1\n\nDuring handling:\n\n'
        'Traceback (most recent call last):\n  File "b.py", line 2, in g\n    h(\n    ^^\n    )\n'
        "torch.OutOfMemoryError: CUDA out of memory.\n  Tried: 2 GiB\nlower something\n"
    )
    assert last_exception(text) == (
        "torch.OutOfMemoryError",
        "CUDA out of memory.\n  Tried: 2 GiB\nlower something",
    )
    assert last_exception("nothing of the kind") == ("", "nothing of the kind")


@pytest.mark.parametrize(
    "through", [lambda e: raised(e)[0], lambda e: actor_error(e).as_instanceof_cause()]
)
def test_full_disk_is_reported_without_writing_a_file(through: object, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/data/runs/x/events")
    line = explain(through(full), tmp_path)  # type: ignore[operator]
    assert (
        line
        == "/data/runs/x/events: No space left on device. Free disk space, then continue with --resume"
    )
    assert list(tmp_path.iterdir()) == []
