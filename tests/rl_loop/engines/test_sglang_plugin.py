"""The plugin of SGLang's servers: how SGLang finds and runs it, and its patches."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_loop.cluster.placement import free_port
from rl_loop.engines.backend import EngineUnavailableError
from rl_loop.engines.sglang.config import PLUGIN, SglangConfig
from tests.support.rl_loop.plugin_process import write_modules
from tests.support.waiting import PATIENCE_SECONDS

POOL = """
class SWAKVPool:
    def __init__(self, size, token_to_kv_pool_class, **options):
        options["enable_memory_saver"] = False
        self.pools = [token_to_kv_pool_class(size=n, **options) for n in (size, size // 2)]
"""
CREATE_POOL = """
from importlib.metadata import entry_points
(plugin,) = entry_points(group="sglang.srt.plugins")
plugin.load()()
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
print(SWAKVPool(8, token_to_kv_pool_class=dict, dtype=2).pools)
"""
BACKEND = """
class TritonAttnBackend:
    def __init__(self, window, *, decoding=True):
        self.sliding_window_size, self.decoding = window, decoding
"""
RUN = """
from importlib.metadata import entry_points
(plugin,) = entry_points(group="sglang.srt.plugins")
plugin.load()()
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
backends = [TritonAttnBackend(127, decoding=False), TritonAttnBackend(None)]
print([(b.sliding_window_size, b.decoding) for b in backends])
"""

MANAGER = """
import asyncio


class Lock:
    held = True

    async def is_locked(self):
        return self.held


class TokenizerManager:
    def __init__(self):
        self.is_pause, self.is_pause_cond = False, asyncio.Condition()
        self.model_update_lock, self.aborts, self.sent = Lock(), 0, []

    def abort_request(self, abort_all):
        assert abort_all
        self.aborts += 1

    async def pause_generation(self, request):
        async with self.is_pause_cond:
            self.is_pause = True
            if request.mode != "abort":
                self.sent.append(request.mode)
                return
            while True:
                self.abort_request(abort_all=True)
                if not await self.model_update_lock.is_locked():
                    break
                await asyncio.sleep(5.0)
"""
PAUSE = """
import asyncio, time
from importlib.metadata import entry_points
from types import SimpleNamespace
(plugin,) = entry_points(group="sglang.srt.plugins")
plugin.load()()
from sglang.srt.managers.tokenizer_manager import TokenizerManager

async def pause():
    manager = TokenizerManager()
    began = time.monotonic()
    pausing = asyncio.create_task(manager.pause_generation(SimpleNamespace(mode="abort")))
    await asyncio.sleep(0.1)
    still_running = not pausing.done()
    manager.model_update_lock.held = False  # the last request has ended
    await pausing
    seconds = time.monotonic() - began
    other = TokenizerManager()
    await other.pause_generation(SimpleNamespace(mode="retract"))
    print(manager.is_pause, manager.aborts > 1, still_running, seconds < 4, other.sent)

asyncio.run(pause())
"""

PATCHES = "GPTOSS_SGLANG_PATCHES"
ALWAYS = "hidden_key,bound_store"
"""Patches of every server."""
TRITON: dict[str, object] = {"attention_backend": "triton"}
COLOCATED: dict[str, object] = {"colocated": True, "weight_sync": "cuda_ipc"}


def run(
    tmp_path: Path, version: str, settings: dict[str, object], code: str
) -> subprocess.CompletedProcess[str]:
    modules = {
        "sglang/version.py": f'__version__ = "{version}"\n',
        "sglang/srt/layers/attention/triton_backend.py": BACKEND,
        "sglang/srt/mem_cache/swa_memory_pool.py": POOL,
        "sglang/srt/managers/tokenizer_manager.py": MANAGER,
    }
    write_modules(tmp_path, modules)
    # Disable patches that are not tested here, because they need more of SGLang, or torch.
    environment = SglangConfig(
        fp32_logits=False, env={"PYTHONPATH": str(tmp_path)}, **settings
    ).environment
    patches = environment[PATCHES].removeprefix(f"{ALWAYS},").split(",")
    kernels = ("fused_sampling", "fused_window_attention")
    environment[PATCHES] = ",".join(patch for patch in patches if patch not in kernels)
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_triton_backend_decodes_the_window_of_a_query(tmp_path: Path) -> None:
    done = run(tmp_path, "0.5.17", TRITON, RUN)
    assert done.stdout == "[(128, False), (None, True)]\n", done.stderr


def test_other_sglang_version_is_rejected_before_it_serves(tmp_path: Path) -> None:
    done = run(tmp_path, "0.5.18", TRITON, RUN)
    assert done.returncode == 1
    assert (
        "a patch for SGLang 0.5.17, but this is 0.5.18. Either use attention_backend fa3"
        in done.stderr
    )


def test_sleeping_server_releases_both_pools_of_its_cache(tmp_path: Path) -> None:
    done = run(tmp_path, "0.5.17", COLOCATED, CREATE_POOL)
    pools = [{"size": n, "dtype": 2, "enable_memory_saver": True} for n in (8, 4)]
    assert done.stdout == f"{pools}\n", done.stderr


def test_server_on_separate_gpus_has_sglangs_own_cache(tmp_path: Path) -> None:
    done = run(tmp_path, "0.5.17", TRITON, CREATE_POOL)
    assert "True" not in done.stdout
    assert "False" in done.stdout, done.stderr


def test_pause_ends_with_the_last_request(tmp_path: Path) -> None:
    done = run(tmp_path, "0.5.17", {}, PAUSE)
    assert done.stdout == "True True True True ['retract']\n", done.stderr


def test_other_sglang_version_serves_without_the_pause_patch(tmp_path: Path) -> None:
    """Without the patch a pause only takes longer, so the server starts."""
    done = run(tmp_path, "0.5.18", {}, PAUSE)
    assert done.stdout.split()[3] == "False", done.stderr
    assert "fast_abort is not applied, because it is for SGLang 0.5.17" in done.stderr


def test_servers_get_the_patches_of_their_settings() -> None:
    def patches(**settings: object) -> str:
        return SglangConfig(**settings).environment[PATCHES]

    assert (
        patches(attention_backend="fa3")
        == f"{ALWAYS},fast_abort,fused_sampling,fused_window_attention,fp32_logits"
    )
    assert patches(**TRITON) == f"{ALWAYS},triton_window,fast_abort,fused_sampling,fp32_logits"
    assert (
        patches(**COLOCATED)
        == f"{ALWAYS},paused_cache,fused_sampling,fused_window_attention,fp32_logits"
    )
    assert patches(**COLOCATED, deterministic=True) == f"{ALWAYS},paused_cache"
    assert SglangConfig(**TRITON).environment["PYTHONPATH"] == str(PLUGIN)


def test_interpreter_that_hides_the_plugin_is_rejected(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    (packages / "sglang").mkdir(parents=True)
    (packages / "sglang/__init__.py").touch()
    settings = {"attention_backend": "triton", "python": str(tmp_path / "python")}

    def wrap(python_path: str) -> None:
        wrapper = tmp_path / "python"
        line = f'PYTHONPATH="{python_path}" exec {sys.executable} "$@"'
        wrapper.write_text(f"#!/bin/sh\n{line}\n")
        wrapper.chmod(0o755)

    wrap(f"$PYTHONPATH:{packages}")
    SglangConfig(**settings).check_machine()

    wrap(str(packages))
    with pytest.raises(
        EngineUnavailableError,
        match=r"the plugin for .*triton_window, fast_abort, fused_sampling, fp32_logits\. ",
    ):
        SglangConfig(**settings).check_machine()
    SglangConfig(**settings, env={"SGLANG_PLUGINS": "none"}).check_machine()


@pytest.mark.slow
@pytest.mark.skipif(
    "GPTOSS_SGLANG_PYTHON" not in os.environ, reason="GPTOSS_SGLANG_PYTHON is not set"
)
def test_real_sglang_runs_the_plugin() -> None:
    code = "from sglang.srt.plugins import load_plugins; load_plugins()\n"
    code += "from sglang.srt.layers.attention.triton_backend import TritonAttnBackend as backend\n"
    code += "print(backend.__init__.__code__.co_name)"
    environment = os.environ | SglangConfig(attention_backend="triton").environment
    python = os.environ["GPTOSS_SGLANG_PYTHON"]
    done = subprocess.run(
        [python, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-1] == "with_the_query", done.stderr


def imported_packages(source: str) -> set[str]:
    """Return the top-level packages that a source imports, also in functions."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add((node.module or "").partition(".")[0])
    return packages


def test_plugin_imports_only_packages_of_a_server_environment() -> None:
    modules = {path.stem: path.read_text() for path in PLUGIN.glob("*.py")}
    assert "gptoss_mxfp4_experts" in modules
    available = {"torch", "triton", "triton_kernels", "sglang"} | set(modules)
    for name, source in modules.items():
        missing = imported_packages(source) - available - sys.stdlib_module_names
        assert not missing, f"{name} imports {', '.join(missing)}"


KEY_AND_STORE = """
import os, sys, torch.distributed as dist
from importlib.metadata import entry_points
(plugin,) = entry_points(group="sglang.srt.plugins")
plugin.load()()
from sglang.srt.server_args import ServerArgs
print(ServerArgs("model", "secret-key", None))

port = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
import psutil
def listening(port):
    return [c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == port and c.status == "LISTEN"]
print(listening(port))

from torch.distributed.rendezvous import rendezvous
store, rank, world_size = next(rendezvous("tcp://file.invalid:7", rank=0, world_size=1))
store.set("key", "value")
print(type(store).__name__, os.listdir(os.environ["GPTOSS_STORE_DIR"]), listening(7))
print(hasattr(dist.distributed_c10d._new_process_group_helper, "without_authentication"))
"""
SERVER_ARGS = """
import dataclasses
@dataclasses.dataclass
class ServerArgs:
    model_path: str
    api_key: str | None
    admin_api_key: str | None
"""


@pytest.mark.parametrize("version", ["0.5.17", "0.6.0"])
def test_plugin_hides_the_key_and_closes_process_groups(version: str, tmp_path: Path) -> None:
    """The plugin patches SGLang, which prints its arguments, and torch.

    torch opens a store on every address of the machine, and gloo accepts any process as a rank. The
    patches of torch apply to all versions of SGLang.
    """
    modules = {"sglang/version.py": f'__version__ = "{version}"\n'}
    write_modules(tmp_path, modules | {"sglang/srt/server_args.py": SERVER_ARGS})
    stores = tmp_path / "stores"
    stores.mkdir()
    paths = os.pathsep.join([str(PLUGIN), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", KEY_AND_STORE, str(free_port())],
        env=os.environ | {"PYTHONPATH": paths, PATCHES: ALWAYS, "GPTOSS_STORE_DIR": str(stores)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    key = "***" if version == "0.5.17" else "secret-key"
    assert done.stdout.splitlines() == [
        f"ServerArgs(model_path='model', api_key='{key}', admin_api_key=None)",
        "['127.0.0.1']",
        "FileStore ['store-7'] []",
        "True",
    ], done.stderr
