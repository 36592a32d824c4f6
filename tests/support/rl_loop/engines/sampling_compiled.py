"""Compiles the plugin's sampling kernels for a Hopper GPU:

PYTHONPATH=rl_loop/engines/sglang/plugin python -m tests.support.rl_loop.engines.sampling_compiled
"""

import gptoss_sampling as sampling
import torch

from tests.support.rl_loop.engines.compiled_for_hopper import Compiling

GPT_OSS = 201_088
SHAPES = [(1, GPT_OSS), (2, GPT_OSS), (64, GPT_OSS), (256, GPT_OSS), (1000, GPT_OSS), (3, 1021)]
"""Number of requests, and size of the vocabulary."""

if __name__ == "__main__":
    weigh = Compiling(sampling._weigh_slices_kernel)
    choose = Compiling(sampling._choose_token_kernel)
    sampling._weigh_slices_kernel, sampling._choose_token_kernel = weigh, choose
    for requests, vocabulary in SHAPES:
        sampling.sample(
            torch.empty(requests, vocabulary),
            torch.ones(requests),
            torch.zeros(requests, 2, dtype=torch.float64),
        )

    for kernel in (weigh, choose):
        for used in kernel.resources:
            assert used.spilled == 0, used
        of_gpt_oss = {
            used.variant
            for used, (_, vocabulary) in zip(kernel.resources, SHAPES, strict=True)
            if vocabulary == GPT_OSS
        }
        print(f"{len(kernel.resources)} shapes, {len(of_gpt_oss)} variant of GPT-OSS")
