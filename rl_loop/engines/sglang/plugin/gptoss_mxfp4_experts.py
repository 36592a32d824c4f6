"""Weight syncs, checksums and routes of SGLang 0.5.17 servers that hold MXFP4 experts.

With ``--moe-runner-backend triton_kernel`` a server turns the experts that it loads into layouts of
the GPU's tensor cores (``gptoss_hopper_layout``) and deletes what they were made from. A later
``load_weights`` finds nothing to load them into: blocks are a KeyError, biases a TypeError, and
scales go into a copy that nobody reads. Here

* the layouts are allocated instead of SGLang's parameters when the model is made. Parameters that
  are deleted later stay in the memory saver's pool, which gives nothing back: every server would
  hold its experts twice;
* blocks, scales and biases by Hugging Face's names are cut as SGLang cuts them for its ranks, and
  written into the memory that the server computes with, which CUDA graphs know by its address. All
  of that memory is written, padding too: a server that slept has lost it. A server that starts
  from a checkpoint loads it in the same way;
* a tensor that is unknown, comes twice, has another shape or dtype, or, when a sync ends, has not
  come or has a scale that is too large, is an error that names it, on whichever rank that is:
  SGLang tells the first rank's only;
* ``/weights_checker`` hashes the experts as they came, read back from where they are computed with;
  stale padding takes the place of the hash;
* products make values of what is in that memory (``gptoss_expert_values``);
* experts that the router chose are recorded, as with other expert kernels.

This module changes SGLang's classes. What they then do is in ``gptoss_expert_layers`` (allocating),
``gptoss_expert_storage`` (cutting, writing, reading) and ``gptoss_synced_model`` (what has come). All
of these are imported in servers by their own names, where nothing else of the project is installed.
"""

import logging
from functools import wraps
from typing import Any

import gptoss_expert_values
import torch
from gptoss_expert_layers import allocate, compare_layouts
from gptoss_expert_routing import EXPERTS
from gptoss_expert_storage import WrongWeights
from gptoss_synced_model import is_starting, synced
from torch import Tensor

logger = logging.getLogger(__name__)

BEGIN_SYNC = "gptoss_begin_sync"
END_SYNC = "gptoss_end_sync"
"""Actions of ``/weights_checker``: forget which tensors came, and raise unless all have come, with
scales that the kernels multiply with."""


def install() -> None:
    """Change SGLang's classes, and what they multiply with."""
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
            raise RuntimeError("MXFP4 experts are synced with --moe-runner-backend triton_kernel")
        device = torch.empty(0).device  # on which SGLang makes the model
        # SGLang's own parameters, as shapes without memory: ``allocate`` reads the shapes, and
        # replaces or deletes every one of them.
        with torch.device("meta"):
            original_create(self, layer, *arguments, **options)

        # In every rank of a server. A triton_kernels with other layouts ends the start here, before
        # a token is sampled from scrambled experts.
        if layer.layer_id == 0:
            compare_layouts(mxfp4._swizzle_mxfp4, device)
        self.gptoss_experts = allocate(layer, self, device)
        if layer.layer_id == 0:
            for name, tensor in self.gptoss_experts.storage.items():
                logger.info("MXFP4 experts: %s is kept as %s", name, list(tensor.shape))

    @wraps(method.process_weights_after_loading)
    def mark_as_loaded(self: Any, layer: Any) -> None:
        # Nothing is left to do. SGLang calls this once more whenever it has loaded from a disk.
        self.gptoss_loaded = True

    @wraps(original_load)
    def load_weights(self: Any, weights: Any, *arguments: Any, **options: Any) -> Any:
        known = synced(self)
        if known is None:
            return original_load(self, weights, *arguments, **options)
        try:
            with torch.no_grad():
                # SGLang iterates over what it is given: experts' tensors are taken out on the way,
                # and it sees the rest.
                result = original_load(self, known.load_experts(weights), *arguments, **options)
            if is_starting(self):
                known.end_sync()  # a checkpoint has all
            return result
        except Exception:
            # An answer has half a sentence of it; the log has all.
            logger.exception("weights were refused")
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
        if action not in (BEGIN_SYNC, END_SYNC):
            return original_handle(self, action, *arguments, **options)
        known = synced(self._get_model())
        if known is None:
            raise WrongWeights("the server holds no MXFP4 experts")
        if action == BEGIN_SYNC:
            known.begin_sync()
        else:
            known.end_sync()
        return None

    @wraps(original_checksum)
    def compute_checksum(self: Any) -> Any:
        answer = original_checksum(self)
        known = synced(self._get_model())
        if known is not None:
            with torch.no_grad():
                answer["checksums"] |= known.checksums(weight_checker._hash_tensor)
        return answer

    checker.handle = handle
    checker._compute_checksum = compute_checksum


def _install_answers_of_all_ranks() -> None:
    """Let a sync begin and end well only if it does so on every tensor-parallel rank."""
    from sglang.srt.managers.scheduler_components import weight_updater

    manager = weight_updater.SchedulerWeightUpdaterManager
    original_check = manager.check_weights

    @wraps(original_check)
    def check_weights(self: Any, request: Any) -> Any:
        answer = original_check(self, request)
        if request.action not in (BEGIN_SYNC, END_SYNC):
            return answer

        # Only the first rank's answer leaves the server, here as where weights arrive: what another
        # rank could not load, nobody would hear of.
        ranks = torch.distributed.get_world_size(group=self.tp_cpu_group)
        failures = [""] * ranks
        own_failure = "" if answer.success else answer.message
        torch.distributed.all_gather_object(failures, own_failure, group=self.tp_cpu_group)
        for rank, failure in enumerate(failures):
            if failure:
                answer.success = False
                answer.message = f"tensor-parallel rank {rank} of {ranks}: {failure}"
                break
        return answer

    manager.check_weights = check_weights


def _install_routes() -> None:
    """Record the experts of every token, which SGLang does for its other expert kernels."""
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
        # By way of a list: the choice is made in a function inside, which knows neither the layer
        # nor its configuration.
        chosen.clear()
        result = original_forward(self, *arguments, **options)
        # What gptoss_expert_routing has routed, if it is installed, it tells with its answer.
        routed = getattr(getattr(result, "routing_data", None), EXPERTS, None)
        if routed is not None:
            chosen.append(routed)
        # [tokens, top_k], by number of the expert. Inside a CUDA graph this becomes a part of it.
        for indices in chosen:
            topk.capture_routed_experts_if_allowed(self.topk_config, self.layer_id, indices)
        chosen.clear()
        return result

    topk.triton_kernels_topk = choose
    topk.TopK.forward_cuda = forward
