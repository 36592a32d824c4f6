"""Megatron imports torch's compiler only in processes with a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

IMPORTED = """
import sys
import rl_loop.trainer.worker
import torch
compiler = [name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo"))]
print("megatron.core" in sys.modules, len(compiler), torch.compile.__module__)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU Megatron's functions are compiled")
def test_a_trainers_process_does_not_import_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "0", "torch"]
