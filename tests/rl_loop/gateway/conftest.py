"""Policy that all gateway tests sample from. It is trained once."""

from __future__ import annotations

import pytest
from transformers import GptOssForCausalLM

from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.clients import no_client_is_left as no_client_is_left
from tests.support.rl_loop.gateway.policy import Script, learned_model, tiny_config


@pytest.fixture(scope="session")
def script(tiny: Harmony) -> Script:
    return Script(tiny)


@pytest.fixture(scope="session")
def model(tiny: Harmony, script: Script) -> GptOssForCausalLM:
    return learned_model(tiny_config(tiny.vocabulary.size), script.lessons())
