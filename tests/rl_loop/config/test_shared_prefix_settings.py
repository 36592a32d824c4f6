"""Settings of shared prefixes: their meaning, and refusals that name their keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_gptoss.prefix_tree import PrefixSharing
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.engines.sglang import backend
from rl_loop.run_parts import backend_context

CONFIGS = Path(__file__).parents[3] / "configs"


def rl(*overrides: str) -> RlConfig:
    return load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, list(overrides))


def test_sequences_share_no_prefixes_by_default() -> None:
    assert rl().training.prefix_sharing is None
    assert rl("training.share_prefixes=off").training.share_prefixes == "off"
    # A complete configuration has all keys.
    assert rl("training.min_shared=64").training.prefix_sharing is None


@pytest.mark.parametrize("prompts_only", [True, False])
def test_share_prefixes_selects_tokens(prompts_only: bool) -> None:
    scope = "prompts" if prompts_only else "all"
    sharing = rl(f"training.share_prefixes={scope}").training.prefix_sharing
    assert sharing == PrefixSharing(64, prompts_only)
    overrides = [f"training.share_prefixes={scope}", "training.min_shared=5"]
    sft = load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, overrides)
    assert sft.training.prefix_sharing == PrefixSharing(5, prompts_only)


REFUSED = {
    "training.min_shared (5) has no effect while training.share_prefixes is off": [
        "training.min_shared=5"
    ],
    "min_shared: Input should be greater than 0": [
        "training.share_prefixes=all",
        "training.min_shared=0",
    ],
    "parallel.context_scheme_full=all_to_all does not support training.share_prefixes (all)": [
        "training.share_prefixes=all",
        "parallel.context_scheme_full=all_to_all",
    ],
    "parallel.context_scheme_window=all_to_all does not support training.share_prefixes": [
        "training.share_prefixes=prompts",
        "parallel.context_scheme_window=all_to_all",
    ],
    "ablation.router_noise (0.1) draws other experts": [
        "training.share_prefixes=all",
        "ablation.router_noise=0.1",
    ],
    "algorithm.mini_batches (13) exceeds rollout.tasks_per_step (12)": [
        "training.share_prefixes=prompts",
        "algorithm.mini_batches=13",
        "algorithm.old_log_probs=forward",
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_settings_are_refused_by_name(message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rl(*REFUSED[message])
    assert message in str(raised.value)


def test_refused_settings_are_allowed_without_sharing() -> None:
    for message, overrides in REFUSED.items():
        allowed = [change for change in overrides if not change.startswith("training.")]
        if allowed:
            assert rl(*allowed).training.share_prefixes == "off", message


@pytest.mark.parametrize("sharing", ["off", "prompts", "all"])
@pytest.mark.parametrize("replay", ["none", "R3"])
def test_servers_keep_groups_if_prompts_need_equal_experts(
    monkeypatch: pytest.MonkeyPatch, sharing: str, replay: str
) -> None:
    def actors(*args: object) -> SimpleNamespace:
        return SimpleNamespace(actors=[], api_key="")

    monkeypatch.setattr(backend, "ServerActors", actors)
    config = rl(
        "rollout.engine={type: sglang}",
        f"training.share_prefixes={sharing}",
        f"algorithm.routing_replay={replay}",
    )
    servers = backend.SglangBackend(config.rollout.engine, backend_context(config))
    engine = servers.engine_factory()()
    assert engine._keep_groups is (sharing != "off" and replay == "R3")
