"""Readers of untrusted files accept only regular files of a limited size.

A FIFO would block, a device has no end, and deep JSON overflows the interpreter's stack. Each is
rejected with a one-line error that names the file.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from converters.adapter_checkpoint import import_adapter
from converters.hf_directory import HfDirectory
from converters.merge_adapter import merge_adapter
from converters.torch_dist import export_checkpoint, import_checkpoint
from converters.verify import verify
from megatron_gptoss.families.registry import read_hf_config
from rl_loop.chat.tokenizer_vocabulary import read_vocabulary
from rl_loop.chatml.vocabulary import ChatMlVocabulary
from rl_loop.config.served import load_served_config
from rl_loop.lifecycle.weight_checks import check_weights
from tests.support.converters.models import TINY, save_hf
from tests.support.converters.peft_adapters import write_adapter

SECONDS = 20
"""Time limit of a reader, in seconds. A read of a FIFO never ends."""


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    """Create a model (``hf``), a PEFT adapter (``adapter``) and a checkpoint (``megatron``)."""
    directory = tmp_path_factory.mktemp("intact")
    hf = save_hf(directory / "hf", weights)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (hf / name).write_text("{}")
    (hf / "chat_template.jinja").write_text("x")
    write_adapter(directory / "adapter", TINY, ["q_proj"])
    import_checkpoint(hf, directory / "megatron")
    return directory


@pytest.fixture
def root(tmp_path: Path, intact: Path) -> Path:
    """Copy the files of ``intact``, because every test damages one. An import takes 0.1 s."""
    shutil.copytree(intact, tmp_path, dirs_exist_ok=True)
    return tmp_path


def as_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def as_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def as_deep_json(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


def as_deep_object(path: Path) -> None:
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


def as_endless_spaces(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2 << 30)  # zeros that use no disk space


def as_latin_text(path: Path) -> None:
    path.write_bytes(b'{"a": "\xff"}')


def as_list(path: Path) -> None:
    path.write_text("[1]")


KINDS = (
    as_fifo,
    as_device,
    as_deep_json,
    as_deep_object,
    as_endless_spaces,
    as_latin_text,
    as_list,
)
NOT_REGULAR = (as_fifo, as_device)

READERS: dict[str, Callable[[Path], object]] = {
    "import": lambda root: import_checkpoint(root / "hf", root / "out"),
    "export": lambda root: export_checkpoint(
        root / "megatron", root / "out", reference=root / "hf"
    ),
    "merge": lambda root: merge_adapter(root / "hf", root / "adapter", root / "out", "fp32"),
    "import-adapter": lambda root: import_adapter(root / "adapter", root / "out", root / "hf"),
    "verify": lambda root: verify(root / "hf", root / "megatron"),
    "initial_weights": lambda root: check_weights("initial_weights", root / "hf", TINY),
    "initial_weights of Megatron": lambda root: check_weights("key", root / "megatron", TINY),
    "model": lambda root: read_hf_config(root / "hf"),
    "serve": lambda root: load_served_config(root / "hf"),
    "tokenizer": lambda root: read_vocabulary(ChatMlVocabulary, root / "hf", 96),
    "a checkpoint": lambda root: export_checkpoint(root / "megatron", root / "out"),
}
FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "hf/config.json": {"json": ("import", "merge", "initial_weights", "model", "serve", "verify")},
    "hf/generation_config.json": {"json": ("import", "export", "merge")},
    "hf/tokenizer_config.json": {"json": ("import", "export", "merge")},
    "hf/tokenizer.json": {"json": ("tokenizer",), "file": ("import", "export", "merge")},
    "hf/chat_template.jinja": {"file": ("import", "export", "merge")},
    "hf/model.safetensors.index.json": {"json": ("import", "merge", "initial_weights")},
    "hf/model.safetensors": {"file": ("import", "merge", "verify")},
    "adapter/adapter_config.json": {"json": ("merge", "import-adapter")},
    "adapter/adapter_model.safetensors": {"file": ("merge", "import-adapter")},
    "megatron/gptoss_config.json": {"json": ("a checkpoint", "initial_weights of Megatron")},
    "megatron/checksums.json": {"json": ("a checkpoint", "verify")},
    "megatron/.metadata": {"file": ("a checkpoint",)},
    "megatron/__0_0.distcp": {"file": ("a checkpoint", "verify")},
    "megatron/hugging_face/tokenizer.json": {"file": ("a checkpoint",)},
}
CASES = [
    (file, kind, reader)
    for file, readers in FILES.items()
    for form, names in readers.items()
    for kind in (KINDS if form == "json" else NOT_REGULAR)
    for reader in names
]


def catch_error(read: Callable[[], object]) -> BaseException | None:
    """Return the error that ``read`` raises. Fail if ``read`` is still running after SECONDS."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            read()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, "still reading"
    return found[0]


@pytest.mark.parametrize(
    ("file", "kind", "reader"), CASES, ids=[f"{f}-{k.__name__}-{r}" for f, k, r in CASES]
)
def test_irregular_file_is_rejected_in_one_line(
    file: str, kind: Callable[[Path], None], reader: str, root: Path
) -> None:
    kind(root / file)
    tracemalloc.start()
    began = time.monotonic()
    error = catch_error(lambda: READERS[reader](root))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(error, ValueError), f"{type(error)}: {error}"
    assert Path(file).name in str(error)
    assert len(str(error).splitlines()) == 1, str(error)
    assert time.monotonic() - began < SECONDS
    assert peak < 64 << 20
    assert not (root / "out").exists()


def test_links_to_regular_files_are_read(root: Path) -> None:
    """The cache of the Hugging Face hub has links to blobs with other names."""
    (root / "blobs").mkdir()
    for number, path in enumerate(sorted((root / "hf").iterdir())):
        blob = root / "blobs" / str(number)
        shutil.move(path, blob)
        path.symlink_to(Path("../blobs") / str(number))
    import_checkpoint(root / "hf", root / "out")
    assert (root / "out/hugging_face/tokenizer.json").read_text() == "{}"


def test_broken_link_differs_from_an_absent_file(root: Path) -> None:
    (root / "hf/model.safetensors.index.json").symlink_to("gone")
    error = catch_error(lambda: HfDirectory(root / "hf"))
    assert "model.safetensors.index.json" in str(error)


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 10**9}, {"num_local_experts": 10**9}, {"vocab_size": 10**18},
     {"num_hidden_layers": 1000, "num_local_experts": 4000}, {"head_dim": 10**12}],
)  # fmt: skip
def test_config_without_bounds_takes_no_memory(change: dict[str, int], root: Path) -> None:
    path = root / "hf/config.json"
    content = {k: v for k, v in json.loads(path.read_text()).items() if k != "layer_types"}
    path.write_text(json.dumps(content | change))
    tracemalloc.start()
    error = catch_error(lambda: HfDirectory(root / "hf"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert next(iter(change)) in str(error)
    assert peak < 16 << 20
