"""A plugin for SGLang 0.5.17 that mends what servers of GPT-OSS need mended.

``GPTOSS_SGLANG_MENDS`` names what, with commas in between:

* ``hidden_key``: the key of a server does not appear in its log, where SGLang prints all arguments.
* ``bound_store``: the store in which processes meet listens on one address. torch would open it on
  every address of the machine, and it has no authentication. The store of a weight sync within one
  machine is a file in GPTOSS_STORES, which only this user can read. Groups of gloo check that all
  ranks know the run's token (``rl_loop.cluster.group_authentication``).
* ``triton_window``: ``triton`` attention decodes with all 128 keys of a window. SGLang gives
  backends the window without the query, 127. Prefill, and other backends, add the query; the
  buffer of keys from which ``triton`` decodes counts the query among the 127 (sglang pull request
  32087). That buffer is all that reads the backend's ``sliding_window_size``; prefill masks by the
  layers' own.
* ``sleeping_cache``: a server that sleeps gives its key/value cache back. ``SWAKVPool``, the cache
  of models with windowed layers, switches the memory saver off for both of its pools, so that
  ``/release_memory_occupation`` answers "success" and frees none of it.
* ``mxfp4_experts``: servers that hold MXFP4 experts take those of a weight sync, tell checksums of
  them and record routes (``gptoss_mxfp4_experts``). SGLang loses them without a word.
* ``sound_assembler``: Triton's kernels are assembled by a ptxas that does not hand out registers which
  the tensor cores are still to read (``gptoss_assembler``).
* ``quick_routing``: a decoding step routes its tokens in one kernel instead of nine
  (``gptoss_expert_routing``).
* ``quick_products``: two to four programs of its expert products run at a time on each of the GPU's
  processors instead of one (``gptoss_expert_products``).
* ``quick_few_tokens``: products of a decoding step or a short prefill run in a kernel of ours
  (``gptoss_expert_matmul``).
* ``quick_pause``: a pause by abort ends as soon as the last request has. SGLang looks once, and if
  anything runs then, again after a whole second.
* ``quick_sampling``: tokens are sampled, and their log-probs computed, in one reading of the logits
  (``gptoss_sampling``).
* ``quick_window``: attention of a decoding step in layers with a sliding window runs in a kernel of
  ours (``gptoss_window_attention``).
* ``fp32_logits``: logits are kept in fp32 instead of being rounded to bf16 (``gptoss_logits``).
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
"""Host that stands for GPTOSS_STORES; its ports are files (``weight_transports.store_path``)."""
GROUP_AUTHENTICATION = Path(__file__).parents[3] / "cluster" / "group_authentication.py"
PAUSE_INTERVAL = 0.02
"""Seconds between two looks whether aborted requests have ended: about one decoding step."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mend:
    """A change of SGLang's code."""

    apply: Callable[[], None]
    advice: str | None = None
    """How a run does without; None if servers of another version may go without it, as only time
    is lost."""
    is_of_torch: bool = False
    """True if it changes torch only, so that it is right for every version of SGLang."""


def register() -> None:
    """Apply what GPTOSS_SGLANG_MENDS names. SGLang calls this in every process of a server."""
    from sglang.version import __version__

    names = os.environ["GPTOSS_SGLANG_MENDS"].split(",")
    has_version = __version__ == VERSION
    for name in names:
        advice = MENDS[name].advice
        if advice is not None and not has_version:
            # SystemExit, because SGLang only logs an Exception of a plugin and would serve
            # unpatched.
            raise SystemExit(
                f"{name} is mended for SGLang {VERSION} and this is {__version__}: {advice}, "
                "or see whether it still needs mending, and if not, set SGLANG_PLUGINS=none"
            )

    for name in names:
        if has_version or MENDS[name].is_of_torch:
            MENDS[name].apply()
        else:
            logger.warning("without %s, which is for SGLang %s", name, VERSION)


def hide_key() -> None:
    """Leave the keys out when SGLang prints a server's arguments."""
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
    """Let the stores of torch that ``tcp://`` addresses name listen on those addresses only.

    An address at FILE_HOST stands for a file. Groups check their ranks.
    """
    from torch.distributed import FileStore

    _module_at(GROUP_AUTHENTICATION).authenticate_groups()

    # The package has a function of the same name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original_store = rendezvous.TCPStore

    def bound_store(
        host_name: str, port: int, world_size: int | None = None, is_master: bool = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        if host_name == FILE_HOST:
            path = os.path.join(os.environ["GPTOSS_STORES"], f"store-{port}")
            store = FileStore(path, world_size or -1)
            if "timeout" in options:
                store.set_timeout(options["timeout"])
            return store
        if is_master:
            listener = socket.create_server((host_name, port))
            options["master_listen_fd"] = listener.detach()
        return original_store(host_name, port, world_size, is_master, **options)

    rendezvous.TCPStore = bound_store


def _module_at(path: Path) -> Any:
    """Import a module whose package a server's environment does not have."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decode_with_whole_window() -> None:
    """Make the window of keys from which ``triton`` decodes one key longer."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    original_init = TritonAttnBackend.__init__

    @wraps(original_init)
    def with_the_query(self: Any, *arguments: Any, **options: Any) -> None:
        original_init(self, *arguments, **options)
        if self.sliding_window_size:
            self.sliding_window_size += 1

    TritonAttnBackend.__init__ = with_the_query


def free_cache_while_sleeping() -> None:
    """Let the memory saver have both pools of a cache with windowed layers."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    original_init = SWAKVPool.__init__

    @wraps(original_init)
    def with_memory_saver(
        self: Any, *arguments: Any, token_to_kv_pool_class: Any, **options: Any
    ) -> None:
        def create_pool(**pool_options: Any) -> Any:
            return token_to_kv_pool_class(**(pool_options | {"enable_memory_saver": True}))

        original_init(self, *arguments, token_to_kv_pool_class=create_pool, **options)

    SWAKVPool.__init__ = with_memory_saver


def sync_mxfp4_experts() -> None:
    """Let servers with MXFP4 experts take weight syncs."""
    import gptoss_mxfp4_experts

    gptoss_mxfp4_experts.install()


def assemble_without_hazards() -> None:
    """Let Triton compile for servers with MXFP4 experts with an assembler that is right."""
    import gptoss_assembler

    gptoss_assembler.install()


def route_in_one_kernel() -> None:
    """Let servers with MXFP4 experts route few tokens, and sum over experts, in kernels of ours."""
    import gptoss_expert_routing

    gptoss_expert_routing.install()


def multiply_in_smaller_programs() -> None:
    """Let servers with MXFP4 experts fill the GPU's processors while they decode."""
    import gptoss_expert_products

    gptoss_expert_products.install()


def multiply_few_tokens_at_once() -> None:
    """Let servers with MXFP4 experts multiply few tokens in a kernel of ours."""
    import gptoss_expert_matmul

    gptoss_expert_matmul.install()


def pause_without_waiting() -> None:
    """Look every ``PAUSE_INTERVAL`` whether aborted requests have ended."""
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
                # Again and again, as SGLang does: a request may be on its way to the scheduler,
                # which does not know it yet. Whoever is answered holds the lock for reading.
                self.abort_request(abort_all=True)
                if not await self.model_update_lock.is_locked():
                    break
                await asyncio.sleep(PAUSE_INTERVAL)

    TokenizerManager.pause_generation = pause_at_once


def sample_in_one_reading() -> None:
    """Let servers sample in kernels of ours."""
    import gptoss_sampling

    gptoss_sampling.install()


def attend_to_windows_at_once() -> None:
    """Let servers with FlashAttention 3 decode windowed layers in a kernel of ours."""
    import gptoss_window_attention

    gptoss_window_attention.install()


def keep_logits_in_fp32() -> None:
    """Let servers compute logits in fp32, as the trainer does."""
    import gptoss_logits

    gptoss_logits.install()


MENDS = {
    "hidden_key": Mend(hide_key),
    "bound_store": Mend(bind_store, is_of_torch=True),
    "triton_window": Mend(decode_with_whole_window, "use attention_backend fa3"),
    "sleeping_cache": Mend(free_cache_while_sleeping, "give servers GPUs of their own"),
    "mxfp4_experts": Mend(sync_mxfp4_experts, "leave rollout.engine.quantization out"),
    "sound_assembler": Mend(assemble_without_hazards),
    "quick_routing": Mend(route_in_one_kernel),
    "quick_products": Mend(multiply_in_smaller_programs),
    "quick_few_tokens": Mend(multiply_few_tokens_at_once),
    "quick_pause": Mend(pause_without_waiting),
    "quick_sampling": Mend(sample_in_one_reading),
    "quick_window": Mend(attend_to_windows_at_once),
    "fp32_logits": Mend(keep_logits_in_fp32),
}
