"""Distribution of the tests over processes (`make test`), and a check for leftover processes."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Generator
from functools import cache
from typing import Any

import pytest
from hypothesis import settings

import megatron_gptoss  # noqa: F401 (before any test imports Megatron: without a GPU it needs no compiler)
from tests.support.forked_workers import forked_python, offer_server
from tests.support.frozen_heap import keep_frozen
from tests.support.leftover_processes import (  # noqa: F401 (hooks of pytest)
    pytest_configure,
    pytest_configure_node,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from tests.support.load import pytest_sessionstart, pytest_unconfigure  # noqa: F401 (hooks of pytest)

# On a busy machine any example may exceed Hypothesis's deadline of 0.2 s.
settings.register_profile("without deadlines", deadline=None, max_examples=50)
settings.load_profile("without deadlines")

START_RAY = {
    "tests/launch/test_cli.py",
    "tests/launch/test_interrupts.py",
    "tests/launch/test_launch.py",
    "tests/rl_loop/agents/test_training.py",
    "tests/rl_loop/algorithms/test_algorithms_guide.py",
    "tests/rl_loop/environments/test_environment_guide.py",
    "benchmarks/tests/test_loop.py",
    "tests/rl_loop/test_loop_on_ray.py",
    "tests/rl_loop/test_session.py",
    "tests/rl_loop/test_sft_on_conversations.py",
    "tests/rl_loop/test_upcycled_chain.py",
    "tests/rl_loop/cluster/test_ray_session.py",
    "tests/rl_loop/engines/test_outside_backend.py",
    "tests/rl_loop/engines/test_sglang_sync.py",
    "tests/rl_loop/engines/test_sglang_sync_faults.py",
    "tests/faults/test_fault_injection.py",
    "tests/rl_loop/lifecycle/test_store_size.py",
    "tests/rl_loop/rollout/test_stored_routes.py",
    "benchmarks/tests/test_data_plane.py",
    "tests/rl_loop/trainer/test_rank_inputs.py",
    "tests/test_examples.py",
    "tests/test_forked_workers.py",
}
"""Files that one process runs. On two cores, two Ray clusters would delay each other's workers and
the sandbox."""

LONGEST = [
    "tests/test_open_doors.py",
    "tests/rl_loop/agents/test_programs.py",
    "tests/megatron_gptoss/test_parallel_layouts.py",
    "tests/test_docs.py",
    "tests/rl_loop/rollout/test_pool_stream.py",
    "tests/rl_loop/rollout/test_asynchronous_steps.py",
    "tests/rl_loop/algorithms/test_algorithms_end_to_end.py",
    "tests/rl_loop/engines/test_expert_routing.py",
    "tests/rl_loop/rewards/test_comparison_pool.py",
    "tests/launch/test_plan.py",
    "tests/converters/test_config_keys.py",
    "tests/rl_loop/lifecycle/test_resume_rules.py",
    "tests/converters/test_model_weights.py",
    "tests/rl_loop/tracking/test_loop_signals.py",
    "tests/megatron_gptoss/test_dense_layouts.py",
    "tests/megatron_gptoss/test_routing_replay.py",
    "tests/megatron_gptoss/test_distributed_optimizer.py",
    "tests/megatron_gptoss/test_shared_prefix_models.py",
    "tests/rl_loop/sandbox/test_sandbox_attacks.py",
    "tests/rl_loop/certify/test_injected_faults.py",
    "tests/rl_loop/trainer/test_adapter_rank.py",
    "tests/rl_loop/trainer/test_trained_tokens.py",
    "tests/megatron_gptoss/test_adapter_layouts.py",
    "tests/rl_loop/environments/test_mcp_tools.py",
    "tests/rl_loop/sandbox/test_sandbox_escape.py",
    "tests/megatron_gptoss/test_checkpoint.py",
    "tests/rl_loop/trainer/test_adapter_archiver.py",
    "tests/rl_loop/data/test_new_column.py",
    "tests/rl_loop/gateway/test_agents_sdk.py",
    "tests/rl_loop/gateway/test_workers.py",
    "tests/rl_loop/engines/test_small_batch_moe.py",
    "tests/rl_loop/engines/test_served_adapters.py",
    "tests/rl_loop/engines/test_fused_sampling.py",
    "tests/test_library_parts.py",
]
"""Files of 12 s of processor time or more without START_RAY, the longest first. A long file must not start last,
because one process would run it alone."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, because they share fixtures. Ray's come first, then LONGEST.

    Files with ``run_distributed`` share a process, too, because each process with such a test
    imports the modules of ranks once more. Files with ``run_with_plugin`` share one for the same
    reason. Files of the gateway share one, because their model trains for 4 s in each process.
    """
    from xdist.scheduler import (
        LoadFileScheduling,
    )  # a local import, because without -n the tests do not need xdist

    # Keep the order of the collection instead of the number of tests.
    config.option.loadscopereorder = False

    @cache
    def choose_group(file: str) -> str:
        if file in START_RAY:
            return "Ray"
        if file.startswith("tests/rl_loop/gateway/"):
            return "gateway"
        text = (config.rootpath / file).read_text()
        if "run_with_plugin" in text:
            return "plugin"
        return "ranks" if "run_distributed" in text else file

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return choose_group(super()._split_scope(nodeid))

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork the test processes. Each would spend at least 5 s of processor time on imports."""
    offer_server()
    for spec in specs:
        spec.python = shlex.join(forked_python())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, which takes a fifth of the time and finds nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring long files to the front if several processes share the tests."""
    if not hasattr(config, "workerinput"):
        return
    rank = {file: number for number, file in enumerate([*sorted(START_RAY), *LONGEST])}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    keep_frozen()
