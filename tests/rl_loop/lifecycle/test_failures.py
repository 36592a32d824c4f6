"""One line about a failure: the actor's exception and not Ray's, and the file with the traceback."""

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
from rl_loop.lifecycle.failures import explain, find_cause, last_exception
from rl_loop.tracking.run_directory import RunWriteError


def raised(error: Exception) -> tuple[Exception, str]:
    """``error`` and its traceback, once it was raised while another one was handled."""
    try:
        try:
            {}["inner"]
        except KeyError:
            raise error from None
    except Exception as caught:
        return caught, traceback.format_exc()


def of_an_actor(error: Exception) -> RayTaskError:
    cause, text = raised(error)
    return RayTaskError(
        "Worker.step", text, cause, proctitle="ray::Worker.step", pid=7, ip="10.0.0.2"
    )


def in_the_making(error: Exception) -> ActorDiedError:
    return ActorDiedError(of_an_actor(error))


@pytest.mark.parametrize(
    "through", [lambda e: of_an_actor(e).as_instanceof_cause(), of_an_actor, in_the_making]
)
def test_the_actors_own_exception_is_told_on_one_line(through: object, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("through", [lambda e: of_an_actor(e).as_instanceof_cause(), in_the_making])
def test_an_error_that_the_user_can_mend_is_told_without_its_class(
    through: object, tmp_path: Path
) -> None:
    line = explain(through(ConversionError("models/x: no config.json")), tmp_path)  # type: ignore[operator]
    assert line == f"models/x: no config.json. The traceback is in {tmp_path}/error.log"
    assert explain(ConfigError("a:\n  b: wrong"), tmp_path) == "a:\n  b: wrong"


def test_an_error_that_only_the_actor_knew_is_recognised_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray keeps only the text of an error in a constructor. The driver may not know the class."""
    died = in_the_making(EndpointError("http://x cannot be used"))
    monkeypatch.delitem(sys.modules, "rl_loop.engines.completions")
    assert (
        explain(died, tmp_path)
        == f"http://x cannot be used. The traceback is in {tmp_path}/error.log"
    )


def test_an_error_of_a_disk_that_the_user_can_mend_keeps_its_two_bases() -> None:
    error = pickle.loads(pickle.dumps(RunWriteError(errno.ENOSPC, "could not write x")))
    assert isinstance(error, UserError)
    assert (str(error), error.errno) == ("could not write x", errno.ENOSPC)


def test_an_error_within_an_error_of_an_actor_is_found() -> None:
    """As a rollout worker passes on what a server's actor raised."""
    outer = of_an_actor(of_an_actor(ValueError("no such token")))
    assert find_cause(outer).kind == "ValueError"
    assert find_cause(outer).message == "no such token"


def test_without_a_directory_the_traceback_is_in_a_file_of_its_own(tmp_path: Path) -> None:
    error, _ = raised(RuntimeError("unknown"))
    for directory in (None, tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        found = re.fullmatch(
            r"RuntimeError: unknown\. The traceback is in (\S+)", explain(error, directory)
        )
        assert found
        assert "RuntimeError: unknown" in Path(found[1]).read_text()
        Path(found[1]).unlink()


def test_two_failures_are_both_in_the_log(tmp_path: Path) -> None:
    for text in ("first", "second"):
        explain(raised(RuntimeError(text))[0], tmp_path)
    assert (tmp_path / "error.log").read_text().count("Traceback") == 2


def test_the_exception_at_the_end_of_a_traceback_is_found_below_its_marks() -> None:
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
    "through", [lambda e: raised(e)[0], lambda e: of_an_actor(e).as_instanceof_cause()]
)
def test_a_full_disk_is_said_without_writing_anything(through: object, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/data/runs/x/events")
    line = explain(through(full), tmp_path)  # type: ignore[operator]
    assert (
        line
        == "/data/runs/x/events: No space left on device. Free disk space, then continue with --resume"
    )
    assert list(tmp_path.iterdir()) == []
