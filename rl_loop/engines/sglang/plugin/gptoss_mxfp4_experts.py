"""Weight syncs, checksums and expert indices for SGLang 0.5.17 servers with MXFP4 experts.

With ``--moe-runner-backend triton_kernel``, SGLang converts the loaded experts into layouts for the
GPU's tensor cores (``gptoss_hopper_layout``) and deletes the original parameters. A later
``load_weights`` cannot load experts: blocks raise a KeyError, biases a TypeError, and scales go
into an unused copy. This module patches SGLang as follows:

* Layouts are allocated instead of SGLang's parameters when the model is created. Parameters that
  are deleted later would stay in the memory saver's pool, so that a server would hold its experts
  twice.
* Blocks, scales and biases with Hugging Face's names are sharded as SGLang shards them. They are
  written into the memory that the server computes with, whose addresses CUDA graphs contain. All of
  that memory is written, including padding, because a server that slept has lost it. A server that
  starts from a checkpoint loads it in the same way.
* A tensor raises an error that names it if it is unknown, comes twice, has a different shape or dtype,
  is missing at the end of a sync, or has a scale that is too large. This holds on every rank.
  SGLang reports only errors of the first rank.
* ``/weights_checker`` hashes the experts in their original format, read back from the memory that
  the server computes with. Wrong padding is reported instead of the hash.
* GEMMs decode values with ``gptoss_expert_values``.
* The experts that the router chooses are recorded, as SGLang does for its other expert kernels.

This module changes SGLang's classes. The work is done in ``gptoss_expert_layers`` (allocation),
``gptoss_expert_storage`` (sharding, writing, reading) and ``gptoss_synced_model`` (received
tensors). Servers import these modules as top-level modules, because the project is not installed
there.
"""

import logging
from functools import wraps
from typing import Any

import gptoss_expert_values
import torch
from gptoss_expert_layers import allocate, compare_layouts
from gptoss_expert_routing import EXPERTS
from gptoss_expert_storage import WrongWeightsError
from gptoss_synced_model import is_starting, synced
from torch import Tensor

logger = logging.getLogger(__name__)

BEGIN_SYNC = "gptoss_begin_sync"
END_SYNC = "gptoss_end_sync"
"""Actions of ``/weights_checker``: clear the record of received tensors, and check it.

The check raises unless all tensors have come, with scales that the kernels support. "END_SYNC:N" ends a sync of N
tensors that leaves out those that training does not change.
"""


def install() -> None:
    """Patch SGLang's classes and triton_kernels' decoding of MXFP4."""
    gptoss_expert_values.install()
    _install_loading()
    _install_checker()
    _install_answers_of_all_ranks()
    _install_routes()


def _install_loading() -> None:
    from sglang.srt.layers.quantization import mxfp4
    from sglang.srt.models.gpt_oss import GptOssForCausalLM

    method = mxfp4.Mxfp4MoEMethod
    original_create = method.create_weights
    original_load = GptOssForCausalLM.load_weights

    @wraps(original_create)
    def create_weights(self: Any, layer: Any, *arguments: Any, **options: Any) -> None:
        if not self.use_triton_kernels:
            raise RuntimeError(
                "MXFP4 experts support weight syncs only with --moe-runner-backend triton_kernel"
            )
        device = torch.empty(0).device  # SGLang sets it as default while it creates the model
        # SGLang's own parameters, as shapes without memory. ``allocate`` reads the shapes, and
        # replaces or deletes every parameter.
        with torch.device("meta"):
            original_create(self, layer, *arguments, **options)

        # On every rank of a server: a triton_kernels with other layouts stops the start here,
        # before a server samples tokens from scrambled experts.
        if layer.layer_id == 0:
            compare_layouts(mxfp4._swizzle_mxfp4, device)
        self.gptoss_experts = allocate(layer, self, device)
        if layer.layer_id == 0:
            for name, tensor in self.gptoss_experts.storage.items():
                logger.info("MXFP4 experts: %s is stored as %s", name, list(tensor.shape))

    @wraps(method.process_weights_after_loading)
    def mark_as_loaded(self: Any, layer: Any) -> None:
        # No work is left. SGLang calls this again whenever it has loaded from a disk.
        self.gptoss_loaded = True

    @wraps(original_load)
    def load_weights(self: Any, weights: Any, *arguments: Any, **options: Any) -> Any:
        known = synced(self)
        if known is None:
            return original_load(self, weights, *arguments, **options)
        try:
            with torch.no_grad():
                # SGLang iterates over the weights. ``load_experts`` takes the experts' tensors out
                # and yields the others.
                result = original_load(self, known.load_experts(weights), *arguments, **options)
            if is_starting(self):
                known.end_sync()  # a checkpoint contains all tensors
            return result
        except Exception:
            # SGLang's response contains only a part of the error. The log contains all of it.
            logger.exception("the server rejected weights")
            raise

    method.create_weights = create_weights
    method.process_weights_after_loading = mark_as_loaded
    GptOssForCausalLM.load_weights = load_weights


def _install_checker() -> None:
    from sglang.srt.utils import weight_checker

    checker = weight_checker.WeightChecker
    original_handle = checker.handle
    original_checksum = checker._compute_checksum

    @wraps(original_handle)
    def handle(self: Any, action: str, *arguments: Any, **options: Any) -> Any:
        if not _is_sync_action(action):
            return original_handle(self, action, *arguments, **options)
        known = synced(self._get_model())
        if known is None:
            raise WrongWeightsError("the server has no MXFP4 experts")
        if action == BEGIN_SYNC:
            known.begin_sync()
        else:
            known.end_sync(sent_tensors(action))
        return None

    @wraps(original_checksum)
    def compute_checksum(self: Any) -> Any:
        result = original_checksum(self)
        known = synced(self._get_model())
        if known is not None:
            with torch.no_grad():
                result["checksums"] |= known.checksums(weight_checker._hash_tensor)
        return result

    checker.handle = handle
    checker._compute_checksum = compute_checksum


def _is_sync_action(action: str) -> bool:
    """Return True for BEGIN_SYNC and END_SYNC, with or without a number."""
    return action.partition(":")[0] in (BEGIN_SYNC, END_SYNC)


def sent_tensors(action: str) -> int | None:
    """Return the number of tensors in an END_SYNC action; None if it has none."""
    number = action.partition(":")[2]
    return int(number) if number else None


def _install_answers_of_all_ranks() -> None:
    """Let BEGIN_SYNC and END_SYNC succeed only if every tensor-parallel rank succeeds."""
    from sglang.srt.managers.scheduler_components import weight_updater

    manager = weight_updater.SchedulerWeightUpdaterManager
    original_check = manager.check_weights

    @wraps(original_check)
    def check_weights(self: Any, request: Any) -> Any:
        result = original_check(self, request)
        if not _is_sync_action(request.action):
            return result

        # SGLang returns only the first rank's result, also for endpoints that load weights. Errors
        # of other ranks would be lost.
        ranks = torch.distributed.get_world_size(group=self.tp_cpu_group)
        failures = [""] * ranks
        own_failure = "" if result.success else result.message
        torch.distributed.all_gather_object(failures, own_failure, group=self.tp_cpu_group)
        for rank, failure in enumerate(failures):
            if failure:
                result.success = False
                result.message = f"tensor-parallel rank {rank} of {ranks}: {failure}"
                break
        return result

    manager.check_weights = check_weights


def _install_routes() -> None:
    """Record the experts of every token, as SGLang does for its other expert kernels."""
    from sglang.srt.layers.moe import topk

    original_topk = topk.triton_kernels_topk
    original_forward = topk.TopK.forward_cuda
    chosen: list[Tensor] = []

    @wraps(original_topk)
    def choose(*arguments: Any, **options: Any) -> Any:
        sparse_logits = original_topk(*arguments, **options)
        chosen.append(sparse_logits.indx)
        return sparse_logits

    @wraps(original_forward)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        # Passed through a list, because an inner function makes the choice without access to the
        # layer or its configuration.
        chosen.clear()
        result = original_forward(self, *arguments, **options)
        # gptoss_expert_routing, if installed, returns the experts with the routing data.
        routed = getattr(getattr(result, "routing_data", None), EXPERTS, None)
        if routed is not None:
            chosen.append(routed)
        # [tokens, top_k]: expert numbers. In a CUDA graph the recording is captured, too.
        for indices in chosen:
            topk.capture_routed_experts_if_allowed(self.topk_config, self.layer_id, indices)
        chosen.clear()
        return result

    topk.triton_kernels_topk = choose
    topk.TopK.forward_cuda = forward
