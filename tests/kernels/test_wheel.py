"""The distribution gptoss-kernels: it needs only torch, and is not part of megatron-gptoss."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.processor_speed import slowness
from tests.support.wheels import (
    KERNELS,
    ROOT,
    build_wheels,
    link_distributions,
    pip,
    run_isolated,
)

IMPORT_SECONDS = 0.3
"""Limit of processor time to import the kernels after torch. They take 0.04 s."""

PROGRAM = """
import time
import torch

before = time.process_time()
import gptoss_kernels.adapter_merge, gptoss_kernels.logits, gptoss_kernels.vocabulary_softmax
from gptoss_kernels.mxfp4 import dequantize, quantize
from gptoss_kernels.sink_attention import sink_attention

print(time.process_time() - before)
print(gptoss_kernels.__file__)

q, k, v = (torch.randn(8, heads, 16, requires_grad=True) for heads in (4, 2, 2))
lengths = torch.tensor([0, 5, 8], dtype=torch.int32)
sinks = torch.zeros(4, requires_grad=True)
sink_attention(q, k, v, sinks, cu_seqlens=lengths, max_seqlen=5, window=4).sum().backward()
weights = torch.randn(64, 128, dtype=torch.bfloat16)
values = dequantize(*quantize(weights))
print(sinks.grad.isfinite().all().item(), torch.equal(dequantize(*quantize(values)), values))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of the installed wheel, and of torch with its requirements."""
    root = tmp_path_factory.mktemp("kernels")
    (wheel,) = build_wheels(root, KERNELS)
    pip("install", "--no-deps", "--target", root / "installed", wheel, cwd=root)
    torch = root / "torch"
    torch.mkdir()
    link_distributions(torch, "torch")
    return root / "installed", torch


def test_kernels_work_with_torch_alone(kernels: tuple[Path, Path]) -> None:
    """No other package can be imported, not even numpy."""
    installed, torch = kernels
    assert not any((torch / name).exists() for name in ("numpy", "megatron", "transformers", "ray"))
    seconds, file, correct = run_isolated(PROGRAM, installed, torch).splitlines()
    assert file == str(installed / "gptoss_kernels/__init__.py")
    assert correct == "True True"
    # Processor time, because other tests run at the same time.
    assert float(seconds) < IMPORT_SECONDS * slowness()


def test_wheel_has_every_source_file(kernels: tuple[Path, Path]) -> None:
    folder = ROOT / "kernels/gptoss_kernels"
    sources = {
        str(file.relative_to(folder))
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    installed = kernels[0] / "gptoss_kernels"
    assert {path for path in sources if not (installed / path).is_file()} == set()
    (license_file,) = kernels[0].glob("*.dist-info/licenses/LICENSE")
    assert license_file.read_text() == (ROOT / "LICENSE").read_text()


def test_both_distributions_have_one_version() -> None:
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    part = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text())["project"]
    project = whole["project"]
    assert part["version"] == project["version"]
    assert f"{part['name']}=={part['version']}" in project["dependencies"]
    # A file of both would be deleted with either of them.
    packages = whole["tool"]["setuptools"]["packages"]["find"]
    assert "gptoss_kernels*" not in packages["include"] and "where" not in packages

    # The kernels accept the torch of the trainer.
    (least,) = re.findall(r"^torch>=([\d.]+)$", "\n".join(part["dependencies"]), flags=re.M)
    (pinned,) = re.findall(r"^torch==([\d.]+)$", "\n".join(project["dependencies"]), flags=re.M)
    assert pinned.startswith(f"{least}.")
