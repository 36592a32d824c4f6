"""Places of actors on the nodes of a job."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from rl_loop.cluster.placement import ROLLOUT_WORKER, NodeLostError, check_node

FIRST = {"NodeName": "n1", "Alive": True, "Resources": {"CPU": 2.0, "rollout_worker_0": 1.0}}
SECOND = {"NodeName": "n2", "Alive": True, "Resources": {"CPU": 2.0, "rollout_worker_1": 1.0}}
# Ray reports no resources for a dead node.
DEAD = {"NodeName": "n2", "Alive": False, "Resources": {}}


def nodes_are(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any]) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: list(nodes))


def test_placement_on_a_dead_node_raises_an_error_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPTOSS_PLACED", "1")
    nodes_are(monkeypatch, FIRST, SECOND)
    check_node(ROLLOUT_WORKER, 1)

    nodes_are(monkeypatch, FIRST, DEAD)
    check_node(ROLLOUT_WORKER, 0)
    with pytest.raises(NodeLostError, match=r"rollout worker 1 .* its node has died \(n2\)"):
        check_node(ROLLOUT_WORKER, 1)


def test_worker_runs_on_any_node_without_a_placement_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPTOSS_PLACED", raising=False)
    nodes_are(monkeypatch, DEAD)
    check_node(ROLLOUT_WORKER, 1)
