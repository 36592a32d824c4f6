"""SGLang 0.5.17 plugin with patches for servers of GPT-OSS.

``GPTOSS_SGLANG_PATCHES`` names the patches to apply, separated by commas:

* ``hidden_key``: remove the server's key from its log, where SGLang prints all arguments.
* ``bound_store``: let the rendezvous store of processes listen on one address. torch would open it
  on every address of the machine, and the store has no authentication. The store of a weight sync
  within a machine is a file in GPTOSS_STORE_DIR, which only this user can read. Groups of gloo
  check that all ranks know the run's token (``rl_loop.cluster.group_authentication``).
* ``triton_window``: let ``triton`` attention decode with all 128 keys of a window. SGLang gives
  attention backends the window without the query, 127. Prefill and the other backends add the
  query. The buffer of keys from which ``triton`` decodes includes the query in the 127 (sglang pull
  request 32087). Only this buffer reads the backend's ``sliding_window_size``: prefill masks by the
  windows of the layers.
* ``paused_cache``: let a paused server release its key/value cache. ``SWAKVPool``, the cache of
  models with windowed layers, disables the memory saver for both of its pools, so that
  ``/release_memory_occupation`` reports success but frees none of it.
* ``mxfp4_experts``: let servers with MXFP4 experts load them in a weight sync, report their
  checksums and record the experts of tokens (``gptoss_mxfp4_experts``). SGLang would drop them
  silently.
* ``ptxas_override``: compile Triton's kernels with a ptxas that does not reuse registers which the
  tensor cores have not read yet (``gptoss_ptxas``).
* ``fused_routing``: route the tokens of a decoding step in one kernel instead of nine, and let
  prefills of different lengths share compiled kernels (``gptoss_expert_routing``).
* ``moe_occupancy``: run 2 to 4 programs of the expert GEMMs at a time on each multiprocessor of
  the GPU instead of one (``gptoss_moe_occupancy``).
* ``small_batch_moe``: compute the expert GEMMs of a decoding step or a short prefill with a custom
  kernel (``gptoss_small_batch_moe``).
* ``fast_abort``: end a pause with mode "abort" as soon as the last request has ended. SGLang
  checks once, and then again every second while a request is running.
* ``fused_sampling``: sample tokens and compute their log-probs in one pass over the logits
  (``gptoss_sampling``).
* ``fused_window_attention``: compute the attention of a decoding step in layers with a
  sliding window with a custom kernel (``gptoss_window_attention``).
* ``fp32_logits``: keep logits in fp32 instead of rounding them to bf16 (``gptoss_logits``).
"""

import asyncio
import importlib
import importlib.util
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

VERSION = "0.5.17"
FILE_HOST = "file.invalid"
"""Host name that means the directory GPTOSS_STORE_DIR.

Its ports are files (``store_path`` of the sync's transports).
"""
GROUP_AUTHENTICATION = Path(__file__).parents[3] / "cluster" / "group_authentication.py"
PAUSE_INTERVAL = 0.02
"""Seconds between two checks that aborted requests have ended: about one decoding step."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SglangPatch:
    """A patch of SGLang's code."""

    apply: Callable[[], None]
    advice: str | None = None
    """Alternative to the patch, for an error with another version of SGLang.

    None: servers of another version run without the patch, and log a warning.
    """
    is_of_torch: bool = False
    """True if it patches only torch, so that it applies to every version of SGLang."""


def register() -> None:
    """Apply the patches of GPTOSS_SGLANG_PATCHES.

    SGLang calls this in every process of a server.
    """
    from sglang.version import __version__

    names = os.environ["GPTOSS_SGLANG_PATCHES"].split(",")
    # All patches are checked before any is applied, so that no server runs half patched.
    has_version = __version__ == VERSION
    for name in names:
        advice = PATCHES[name].advice
        if advice is not None and not has_version:
            # SystemExit, because SGLang only logs an Exception of a plugin and would serve
            # unpatched.
            raise SystemExit(
                f"{name} is a patch for SGLang {VERSION}, but this is {__version__}. Either "
                f"{advice}, or check whether this version still needs the patch; if not, set "
                "SGLANG_PLUGINS=none, which disables all patches"
            )

    for name in names:
        if has_version or PATCHES[name].is_of_torch:
            PATCHES[name].apply()
        else:
            logger.warning("%s is not applied, because it is for SGLang %s", name, VERSION)


def hide_key() -> None:
    """Remove the keys from the arguments that SGLang prints."""
    from sglang.srt.server_args import ServerArgs

    original_repr = ServerArgs.__repr__

    @wraps(original_repr)
    def without_keys(self: Any) -> str:
        text: str = original_repr(self)
        for key in (self.api_key, self.admin_api_key):
            if key:
                text = text.replace(key, "***")
        return text

    ServerArgs.__repr__ = without_keys


def bind_store() -> None:
    """Let the stores of torch's ``tcp://`` addresses listen only on these addresses.

    An address at FILE_HOST means a file. Process groups check their ranks.
    """
    from torch.distributed import FileStore

    # Before a group exists in this process, because groups authenticate when they are created.
    _module_at(GROUP_AUTHENTICATION).authenticate_groups()

    # import_module returns the module. The package also has a function of this name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original_store = rendezvous.TCPStore

    def bound_store(
        host_name: str, port: int, world_size: int | None = None, is_master: bool = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        if host_name == FILE_HOST:
            path = os.path.join(os.environ["GPTOSS_STORE_DIR"], f"store-{port}")
            # -1 is torch's value for an unknown number of processes.
            store = FileStore(path, world_size or -1)
            # FileStore's constructor has no such argument.
            if "timeout" in options:
                store.set_timeout(options["timeout"])
            return store
        # torch has no argument for the address to listen on, but accepts a socket that listens.
        if is_master:
            listener = socket.create_server((host_name, port))
            options["master_listen_fd"] = listener.detach()
        return original_store(host_name, port, world_size, is_master, **options)

    rendezvous.TCPStore = bound_store


def _module_at(path: Path) -> Any:
    """Import a module from a file, because a server's environment does not have its package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decode_with_whole_window() -> None:
    """Extend the window of keys from which ``triton`` decodes by one key."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    original_init = TritonAttnBackend.__init__

    @wraps(original_init)
    def with_the_query(self: Any, *arguments: Any, **options: Any) -> None:
        original_init(self, *arguments, **options)
        # None for models without windows.
        if self.sliding_window_size:
            self.sliding_window_size += 1

    TritonAttnBackend.__init__ = with_the_query


def free_cache_while_paused() -> None:
    """Enable the memory saver for both pools of a cache with windowed layers."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    original_init = SWAKVPool.__init__

    @wraps(original_init)
    def with_memory_saver(
        self: Any, *arguments: Any, token_to_kv_pool_class: Any, **options: Any
    ) -> None:
        # Both pools are created through this argument, so it is the place to set the option.
        def create_pool(**pool_options: Any) -> Any:
            return token_to_kv_pool_class(**(pool_options | {"enable_memory_saver": True}))

        original_init(self, *arguments, token_to_kv_pool_class=create_pool, **options)

    SWAKVPool.__init__ = with_memory_saver


def sync_mxfp4_experts() -> None:
    """Let servers with MXFP4 experts load weight syncs."""
    # Imported only if requested, because such a module needs parts of SGLang's environment.
    import gptoss_mxfp4_experts

    gptoss_mxfp4_experts.install()


def override_ptxas() -> None:
    """Let Triton compile with a ptxas without the fault, on servers with MXFP4 experts."""
    import gptoss_ptxas

    gptoss_ptxas.install()


def route_in_one_kernel() -> None:
    """Let servers with MXFP4 experts route few tokens and sum over experts in custom kernels.

    Prefills of different lengths then share compiled routing kernels.
    """
    import gptoss_expert_routing

    gptoss_expert_routing.install()


def increase_moe_occupancy() -> None:
    """Let servers with MXFP4 experts use the GPU's multiprocessors fully while they decode."""
    import gptoss_moe_occupancy

    gptoss_moe_occupancy.install()


def use_small_batch_moe() -> None:
    """Let servers with MXFP4 experts multiply few tokens with a custom kernel."""
    import gptoss_small_batch_moe

    gptoss_small_batch_moe.install()


def abort_without_waiting() -> None:
    """Check every ``PAUSE_INTERVAL`` that aborted requests have ended."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    original_pause = TokenizerManager.pause_generation

    @wraps(original_pause)
    async def pause_at_once(self: Any, request: Any) -> None:
        if request.mode != "abort":
            await original_pause(self, request)
            return

        async with self.is_pause_cond:
            self.is_pause = True
            while True:
                # Abort in every round, as SGLang does: the scheduler may not have received a
                # request yet. Requests that are being served hold the lock for reading.
                self.abort_request(abort_all=True)
                if not await self.model_update_lock.is_locked():
                    break
                await asyncio.sleep(PAUSE_INTERVAL)

    TokenizerManager.pause_generation = pause_at_once


def sample_in_one_pass() -> None:
    """Let servers sample with custom kernels."""
    import gptoss_sampling

    gptoss_sampling.install()


def fuse_window_attention() -> None:
    """Let servers with FlashAttention 3 decode windowed layers with a custom kernel."""
    import gptoss_window_attention

    gptoss_window_attention.install()


def keep_logits_in_fp32() -> None:
    """Let servers compute logits in fp32, as the trainer does."""
    import gptoss_logits

    gptoss_logits.install()


PATCHES = {
    "hidden_key": SglangPatch(hide_key),
    "bound_store": SglangPatch(bind_store, is_of_torch=True),
    "triton_window": SglangPatch(decode_with_whole_window, "use attention_backend fa3"),
    "paused_cache": SglangPatch(free_cache_while_paused, "run servers on separate GPUs"),
    "mxfp4_experts": SglangPatch(sync_mxfp4_experts, "leave rollout.engine.quantization out"),
    "ptxas_override": SglangPatch(override_ptxas),
    "fused_routing": SglangPatch(route_in_one_kernel),
    "moe_occupancy": SglangPatch(increase_moe_occupancy),
    "small_batch_moe": SglangPatch(use_small_batch_moe),
    "fast_abort": SglangPatch(abort_without_waiting),
    "fused_sampling": SglangPatch(sample_in_one_pass),
    "fused_window_attention": SglangPatch(fuse_window_attention),
    "fp32_logits": SglangPatch(keep_logits_in_fp32),
}
