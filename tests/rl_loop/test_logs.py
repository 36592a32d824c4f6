"""Logs reach standard error as text or JSON, in the driver and in actors."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from megatron_gptoss.user_error import UserError
from rl_loop import logs
from rl_loop.logs import LogSettings, StderrHandler, configure_logging, with_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    levels = {name: logging.getLogger(name).level for name in logs.PACKAGES}
    yield
    root.handlers = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_plain_lines_have_time_level_module_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogSettings())
    logging.getLogger("rl_loop.weight_sync.canary").info("gap %.1e", 0.02)
    printed = capsys.readouterr()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO rl_loop\.weight_sync\.canary: gap 2\.0e-02\n",
        printed.err,
    )
    assert printed.out == ""


def test_json_lines_can_be_read_back_with_their_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(LogSettings(format="json"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("launch.node").exception("a node is lost")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", record["time"])
    assert (record["level"], record["module"], record["message"]) == (
        "ERROR",
        "launch.node",
        "a node is lost",
    )
    assert record["traceback"].endswith("ValueError: two\nlines")


def test_log_level_applies_to_our_packages_and_not_to_libraries(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(LogSettings(level="DEBUG"))
    for name in ("rl_loop.loop", "converters.model_weights", "some.package"):
        logging.getLogger(name).debug("detail")
        logging.getLogger(name).warning("trouble")
    lines = [
        line.partition(" ")[2].partition(" ")[2] for line in capsys.readouterr().err.splitlines()
    ]
    assert lines == [
        "DEBUG rl_loop.loop: detail",
        "WARNING rl_loop.loop: trouble",
        "DEBUG converters.model_weights: detail",
        "WARNING converters.model_weights: trouble",
        "WARNING some.package: trouble",
    ]


def test_logging_configured_twice_prints_every_record_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(LogSettings())
    configure_logging(LogSettings(format="json"))
    logging.getLogger("rl_loop").warning("once")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "once"


def test_log_lines_follow_a_replaced_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The progress display replaces ``sys.stderr`` after logging was configured."""
    configure_logging(LogSettings())
    later = io.StringIO()
    monkeypatch.setattr("sys.stderr", later)
    logging.getLogger("rl_loop").info("above the display")
    assert later.getvalue().endswith("above the display\n")


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("GPTOSS_LOG", "GPTOSS_LOG is 'loud'. Use one of plain, json"),
        ("GPTOSS_LOG_LEVEL", "GPTOSS_LOG_LEVEL is 'LOUD'. Use one of DEBUG, INFO, WARNING, ERROR"),
    ],
)
def test_invalid_log_variable_is_rejected_with_allowed_values(variable: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        LogSettings.from_environment({variable: "loud"})


def test_actor_logs_in_the_format_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def __init__(self, size: int) -> None:
            self.size = size
            self.handlers = [
                h for h in logging.getLogger().handlers if isinstance(h, StderrHandler)
            ]

    monkeypatch.setenv("GPTOSS_LOG", "json")
    actor = with_logging(Worker)
    monkeypatch.delenv("GPTOSS_LOG")  # as on another machine

    worker = actor(size=3)
    (handler,) = worker.handlers
    assert isinstance(handler.formatter, logs.JsonFormatter)
    assert (worker.size, actor.__name__) == (3, "Worker")
