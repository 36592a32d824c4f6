"""MXFP4 engines are compared with the trainer before they close and the run exports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from rl_loop import run
from rl_loop.weight_sync.source import SyncError


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Recorder of the run's calls to engines and export, in order."""
    recorder = MagicMock()
    session = MagicMock(rollouts=recorder.rollouts)
    session.__enter__.return_value = session
    session.__exit__.return_value = False
    session.interrupt.requested = False
    session.checkpointer.seconds = 0.0
    session.checkpointer.state.step = 0
    loop = MagicMock()
    loop.train.return_value = 1

    monkeypatch.setattr(run, "RlSession", lambda *arguments: session)
    monkeypatch.setattr(run, "build_loop", lambda *arguments: loop)
    recorder.export.return_value = {}
    monkeypatch.setattr(run, "_export", recorder.export)
    for name in ("_compare_answers", "_summary"):
        monkeypatch.setattr(run, name, lambda *arguments: {})
    for name in ("_seconds_of_initial_run", "write_model_card", "collect_model_card_facts"):
        monkeypatch.setattr(run, name, lambda *arguments: 0)
    return recorder


def config(*, has_mxfp4_experts: bool) -> Any:
    engine = SimpleNamespace(has_mxfp4_experts=has_mxfp4_experts)
    return SimpleNamespace(
        algorithm=SimpleNamespace(estimates=()),
        training=SimpleNamespace(steps=1),
        rollout=SimpleNamespace(engine=engine),
        directory="directory",
    )


@pytest.mark.parametrize("has_mxfp4_experts", [True, False])
def test_mxfp4_weights_are_compared_before_the_engines_close(
    has_mxfp4_experts: bool, steps: MagicMock
) -> None:
    run.run_rl(config(has_mxfp4_experts=has_mxfp4_experts), MagicMock())
    names = [name for name, _, _ in steps.mock_calls]
    compared = ["rollouts.compare_weights"] if has_mxfp4_experts else []
    assert names == ["rollouts.ready", *compared, "rollouts.close", "export"]


def test_run_does_not_export_if_engine_weights_differ(steps: MagicMock) -> None:
    steps.rollouts.compare_weights.side_effect = SyncError("but its content differs in a tensor")
    with pytest.raises(SyncError, match="but its content differs"):
        run.run_rl(config(has_mxfp4_experts=True), MagicMock())
    assert not steps.export.called
