"""The viewer's summary of a run directory."""

from pathlib import Path

import pytest

from launch.viewer.run_view import RunView

ALIASES = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
)
"""YAML text of a list with 2^40 values, written with aliases."""


@pytest.mark.parametrize(
    "content", ["algorithm: [", "- a list", "\x00", ALIASES, "x: 1\n" + "#" * (16 << 20)]
)
def test_unreadable_configuration_is_reported_and_retried(content: str, tmp_path: Path) -> None:
    """Without the configuration, it is unknown whether the run was on-policy.

    The meaning of the ratio depends on it.
    """
    view = RunView("damaged", tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(content)

    for _ in range(2):  # the file is unchanged at the second read
        findings = view.overview()["findings"]
        assert findings[0]["level"] == "warning"
        assert findings[0]["message"].startswith(f"{config} cannot be read: ")

    config.write_text("training: {steps: 7}\n")
    overview = view.overview()
    assert overview["findings"] == []
    assert overview["steps"] == 7


def test_overview_step_counts_completed_steps(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("training: {steps: 2}\n")
    lines = [f'{{"step": {step}, "time": 1.0}}\n' for step in (0, 1, 2, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert RunView("run", tmp_path).overview()["step"] == 2
