"""The plugin's sampling: in Triton's interpreter, in SGLang and against torch on a GPU."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rl_loop.engines.sglang.config import PLUGIN, SglangConfig
from tests.support.rl_loop.plugin_process import run_with_plugin, write_modules
from tests.support.tolerances import assert_within, log_prob_error

ROOT = Path(__file__).parents[3]

SAMPLER = """
import torch

SGLANG_RETURN_ORIGINAL_LOGPROB = False


class Sampler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.rl_on_policy_target = None
        self.enable_deterministic = self.use_ascend_backend = False

    def _preprocess_logits(self, logits, sampling_info):
        self.calls.append("preprocess")
        if sampling_info.has_custom_logit_processor:
            logits[:, :6] = float("-inf")
        return logits

    def _sync_token_ids_across_tp(self, batch_next_token_ids, sampling_info):
        self.calls.append("sync")
        if sampling_info.grammars:
            batch_next_token_ids.clamp_(max=1)  # another rank's are smaller

    def forward(
        self,
        logits_output,
        sampling_info,
        return_logprob,
        top_logprobs_nums,
        token_ids_logprobs,
        positions,
    ):
        self.calls.append("SGLang")
        return logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
"""
PROGRAM = """
import os
from types import SimpleNamespace
import torch
import gptoss_sglang

os.environ["GPTOSS_SGLANG_PATCHES"] = "fused_sampling"
gptoss_sglang.register()
from sglang.srt.layers import sampler as module

REQUESTS, VOCABULARY = 3, 8
# Of log_softmax over 8 logits of at most 3: the sum, exp and log, and three differences of 6.
BOUND = 2**-24 * (8 + 8 + 4 * 6 * 4)
torch.manual_seed(5)
LOGITS = torch.randn(REQUESTS, VOCABULARY)
PLAIN = dict(
    temperatures=torch.full((REQUESTS, 1), 2.0),
    is_all_greedy=False,
    need_top_k_sampling=False,
    need_top_p_sampling=False,
    need_min_p_sampling=False,
    sampling_seed=None,
    return_sampling_masks=[False] * REQUESTS,
    has_custom_logit_processor=False,
    grammars=None,
)


def run(logits=LOGITS, attributes=(), return_logprob=True, nums=(0, 0, 0), ids=(None,) * 3, **info):
    sampler = module.Sampler()
    for name, value in dict(attributes).items():
        setattr(sampler, name, value)
    output = SimpleNamespace(next_token_logits=logits.clone() if logits.is_contiguous() else logits)
    info = SimpleNamespace(**(PLAIN | info))
    positions = torch.arange(REQUESTS)
    result = sampler(output, info, return_logprob, nums, ids, positions)
    if "SGLang" in sampler.calls:
        expected = (output, info, return_logprob, nums, ids, positions)
        assert all(one is other for one, other in zip(result, expected, strict=True))
        assert not hasattr(output, "next_token_logprobs")
    return result, output, sampler.calls


torch.manual_seed(0)
tokens, output, calls = run()
expected = (LOGITS.double() / 2).log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
print(calls, tokens.dtype, tokens.shape, output.next_token_logprobs.dtype)
print((output.next_token_logprobs - expected).abs().max() < BOUND)
print(torch.equal(output.next_token_logits, LOGITS))

print("the same seed, other seeds, and no log-probs")
torch.manual_seed(0)
print(torch.equal(run()[0], tokens), all(torch.equal(run()[0], tokens) for _ in range(5)))
_, output, calls = run(return_logprob=False, nums=None, ids=None)
print(calls, hasattr(output, "next_token_logprobs"))

print("a custom processor, masks that nobody asked for, a grammar")
tokens, _, calls = run(has_custom_logit_processor=True, return_sampling_masks=None)
print(calls, (tokens >= 6).all())
tokens, _, calls = run(grammars=["a grammar"])
print(calls, (tokens <= 1).all())

print("cases for SGLang")
for case in (
    dict(is_all_greedy=True),
    dict(need_top_k_sampling=True),
    dict(need_top_p_sampling=True),
    dict(need_min_p_sampling=True),
    dict(sampling_seed=torch.zeros(REQUESTS, dtype=torch.long)),
    dict(return_sampling_masks=[False, True, False]),
    dict(attributes=dict(enable_deterministic=True)),
    dict(attributes=dict(rl_on_policy_target="fsdp")),
    dict(attributes=dict(use_ascend_backend=True)),
    dict(nums=(0, 2, 0)),
    dict(ids=(None, None, [4])),
    dict(logits=LOGITS.bfloat16()),
    dict(logits=torch.randn(VOCABULARY, REQUESTS).T),
    dict(logits=LOGITS[:0]),
):
    _, _, calls = run(**case)
    assert calls == ["SGLang"], (case, calls)
module.SGLANG_RETURN_ORIGINAL_LOGPROB = True
print(run()[2], run(return_logprob=False)[2])
"""


def test_sampling_kernels_equal_float64() -> None:
    program = ROOT / "tests/support/rl_loop/engines/sampling_interpreted.py"
    assert run_with_plugin(str(program), interpreted=True) == "5 shapes\n"


def test_sampling_kernels_compile_once_for_all_batch_sizes() -> None:
    program = "tests.support.rl_loop.engines.sampling_compiled"
    expected = "6 shapes, 1 variant of GPT-OSS\n" * 2
    assert run_with_plugin("-m", program) == expected


def test_sampling_kernels_serve_plain_batches_only(tmp_path: Path) -> None:
    modules = {
        "sglang/srt/layers/sampler.py": SAMPLER,
        "sglang/version.py": '__version__ = "0.5.17"',
    }
    write_modules(tmp_path, modules)
    printed = run_with_plugin("-c", PROGRAM, packages=tmp_path, interpreted=True)
    assert printed.splitlines() == [
        "['preprocess', 'sync'] torch.int32 torch.Size([3]) torch.float32",
        "tensor(True)",
        "True",
        "the same seed, other seeds, and no log-probs",
        "True False",
        "['preprocess', 'sync'] False",
        "a custom processor, masks that nobody asked for, a grammar",
        "['preprocess', 'sync'] tensor(True)",
        "['preprocess', 'sync'] tensor(True)",
        "cases for SGLang",
        "['SGLang'] ['preprocess', 'sync']",
    ]


def test_sampling_kernels_are_the_default_where_supported() -> None:
    def patches(**settings: object) -> list[str]:
        return SglangConfig(**settings).environment["GPTOSS_SGLANG_PATCHES"].split(",")

    assert "fused_sampling" in patches()
    assert "fused_sampling" in patches(attention_backend="triton")
    assert "fused_sampling" in patches(colocated=True, weight_sync="cuda_ipc")
    for settings in (
        {"deterministic": True},
        {"arguments": ["--device", "cpu"]},
        {"attention_backend": "intel_amx"},
    ):
        assert "fused_sampling" not in patches(**settings), settings


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("gptoss_sampling")


@pytest.mark.gpu
def test_step_of_256_requests_is_sampled_as_by_torch(sampling: ModuleType) -> None:
    requests, vocabulary = 256, 201_088
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(requests, vocabulary, device="cuda", generator=generator)
    logits[:, 1000:9000] = -math.inf
    before = logits.clone()
    temperatures = 0.5 + torch.rand(requests, device="cuda", generator=generator)
    uniforms = torch.rand(requests, 2, dtype=torch.float64, device="cuda", generator=generator)
    tokens, log_probs = sampling.sample(logits, temperatures, uniforms)
    assert torch.equal(logits, before)
    repeated = sampling.sample(logits, temperatures, uniforms)
    assert torch.equal(repeated[0], tokens)
    assert torch.equal(repeated[1], log_probs)

    # SGLang computes in fp32. It rounds quotients of up to 30 and sums of 200,000 exponentials.
    scaled = logits / temperatures[:, None]
    theirs = scaled.softmax(-1).log().gather(1, tokens.long()[:, None])[:, 0]
    exact_logits = logits.double() / temperatures.double()[:, None]
    exact = exact_logits.log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    bound = log_prob_error(exact_logits).gather(1, tokens.long()[:, None])[:, 0]
    assert_within(log_probs, exact, bound)
    assert_within(theirs, exact, bound)
    assert not ((tokens >= 1000) & (tokens < 9000)).any()


@pytest.mark.gpu
def test_token_frequencies_equal_torchs_probabilities(sampling: ModuleType) -> None:
    requests, vocabulary, rounds = 256, 201_088, 80
    generator = torch.Generator("cuda").manual_seed(1)
    row = 3 * torch.randn(vocabulary, device="cuda", generator=generator)
    row[[7, 4095, 4096, 100_000, 201_087]] += 14.0
    logits = row.repeat(requests, 1)
    temperatures = torch.full((requests,), 1.2, device="cuda")
    probabilities = (row / 1.2).softmax(-1)

    counts = torch.zeros(vocabulary, device="cuda")
    for _ in range(rounds):
        uniforms = torch.rand(requests, 2, dtype=torch.float64, device="cuda", generator=generator)
        tokens, _ = sampling.sample(logits, temperatures, uniforms)
        counts += torch.bincount(tokens, minlength=vocabulary)

    # Compare the most likely tokens separately and all other tokens per slice.
    draws = requests * rounds
    likely = probabilities.topk(20).indices
    check_counts(counts[likely], probabilities[likely], draws)
    counts[likely] = 0
    probabilities[likely] = 0
    slices = torch.arange(vocabulary, device="cuda") // sampling.SLICE_LOGITS
    zeros = torch.zeros(50, device="cuda")
    check_counts(
        zeros.index_add(0, slices, counts), zeros.index_add(0, slices, probabilities), draws
    )


def check_counts(counts: torch.Tensor, probabilities: torch.Tensor, draws: int) -> None:
    """Check that counts differ by at most 5 standard deviations plus one draw."""
    expected = draws * probabilities
    deviation = (expected * (1 - probabilities)).sqrt()
    assert ((counts - expected).abs() <= 5 * deviation + 1).all()
