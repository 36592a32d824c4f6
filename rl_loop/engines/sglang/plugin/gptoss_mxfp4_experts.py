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
* a tensor that is unknown, comes twice, has another shape or dtype, or has not come when a sync
  ends is an error that names it;
* ``/weights_checker`` hashes the experts as they came, read back from where they are computed with;
  stale padding takes the place of the hash;
* experts that the router chose are recorded, as with other expert kernels.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import gptoss_hopper_layout as layout
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

BLOCK = 32
"""Values that share a scale."""
WARPS = 8
"""Of a program of the expert kernels, which the scales' layout is made for."""
BEGIN_SYNC = "gptoss_begin_sync"
END_SYNC = "gptoss_end_sync"
"""Actions of ``/weights_checker``: forget which tensors came, and raise unless all have come."""
SOURCES = {
    "w13_weight": "gate_up_proj_blocks",
    "w13_weight_scale": "gate_up_proj_scales",
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_weight": "down_proj_blocks",
    "w2_weight_scale": "down_proj_scales",
    "w2_weight_bias": "down_proj_bias",
}
"""SGLang's name of a tensor of the experts -> Hugging Face's."""


class WrongWeights(ValueError):
    """A sync brought something else than the server's model has; the message names the tensor."""


@dataclass(frozen=True)
class Shard:
    """What a tensor-parallel rank holds of the experts' intermediate size."""

    first: int
    last: int
    """One behind it."""
    is_first_rank: bool

    @classmethod
    def of(cls, rank: int, ranks: int, intermediate_size: int) -> "Shard":
        """Cut whole blocks, as ``GptOssForCausalLM._load_mxfp4_experts_weights`` does."""
        per_rank = -(-intermediate_size // BLOCK // ranks) * BLOCK
        return cls(
            first=min(rank * per_rank, intermediate_size),
            last=min((rank + 1) * per_rank, intermediate_size),
            is_first_rank=rank == 0,
        )

    def cut(self, source: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor by the end of its Hugging Face name; blocks as
        [experts, rows, bytes]."""
        if source.endswith("_blocks"):
            whole = whole.flatten(-2)
        if source.startswith("gate_up"):
            # Rows of gate and up take turns.
            return whole[:, 2 * self.first : 2 * self.last]
        if source == "down_proj_bias":
            # The ranks' outputs are added up.
            return whole if self.is_first_rank else torch.zeros_like(whole)
        columns = 2 if source.endswith("_blocks") else BLOCK
        return whole[:, :, self.first // columns : self.last // columns]


@dataclass(frozen=True)
class Experts:
    """The experts of one layer on this rank, and where they are kept.

    The memory of ``storage`` never changes: CUDA graphs read it.
    """

    prefix: str
    """Of the names of their tensors, such as "model.layers.0.mlp.experts."."""
    storage: dict[str, Tensor]
    """By SGLang's name. Of values and scales [experts, *storage shape], contiguous uint8; of biases
    fp32."""
    shard: Shard
    intermediate_size: int
    """Of the whole model."""
    hidden_size: int
    padded_intermediate_size: int
    """On this rank, as SGLang pads it."""

    @property
    def count(self) -> int:
        return len(self.storage["w13_weight"])

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of Hugging Face's tensor."""
        rows, inputs = 2 * self.intermediate_size, self.hidden_size
        if name.startswith("w2"):
            rows, inputs = self.hidden_size, self.intermediate_size
        if name.endswith("_bias"):
            return self.count, rows
        if name.endswith("_scale"):
            return self.count, rows, inputs // BLOCK
        return self.count, rows, inputs // BLOCK, BLOCK // 2

    def shape(self, name: str, *, padded: bool = False) -> tuple[int, int]:
        """Return rows and inputs on this rank of a matrix, without or with SGLang's padding."""
        inner = self.padded_intermediate_size if padded else self.shard.last - self.shard.first
        if name.startswith("w2"):
            return self.hidden_size, inner
        return 2 * inner, self.hidden_size

    def load(self, name: str, whole: Tensor) -> None:
        """Write a tensor to where the server computes with it.

        Raises:
            WrongWeights: if its shape or dtype is another.
        """
        source = SOURCES[name]
        is_bias = name.endswith("_bias")
        fits = whole.dtype.is_floating_point if is_bias else whole.dtype == torch.uint8
        if not fits or tuple(whole.shape) != self.whole_shape(name):
            expected = "floats" if is_bias else "uint8"
            raise WrongWeights(
                f"{self.prefix}{source} has {whole.dtype} {list(whole.shape)}, the server expects {expected} "
                f"{list(self.whole_shape(name))}"
            )

        storage = self.storage[name]
        part = self.shard.cut(source, whole.to(storage.device))
        if is_bias:
            storage.zero_()
            storage[:, : part.shape[1]].copy_(part)
        elif name.endswith("_scale"):
            rows, inputs = self.shape(name, padded=True)
            layout.swizzle_scales(part, (rows, inputs // BLOCK), storage)
        else:
            layout.swizzle_values(part, storage)

    def read(self, name: str) -> tuple[Tensor, int]:
        """Return this rank's part of a tensor as it came, and how many elements of its padding are
        not what ``load`` writes there."""
        storage = self.storage[name]
        rows, inputs = self.shape(name)
        if name.endswith("_bias"):
            return storage[:, :rows].contiguous(), int(storage[:, rows:].count_nonzero())
        if name.endswith("_scale"):
            padded_rows, padded_inputs = self.shape(name, padded=True)
            padded = (padded_rows, padded_inputs // BLOCK)
            return layout.unswizzle_scales(storage, rows, inputs // BLOCK, padded)
        return layout.unswizzle_values(storage, rows, inputs // 2)


# -- the server's layers --------------------------------------------------------------------------


def allocate(layer: Any, method: Any, device: torch.device) -> Experts:
    """Allocate the layouts of a layer's experts in place of the parameters that SGLang has made.

    Weights are zero until they come: padding is counted as stale till then.

    Args:
        layer: whose parameters have shapes only, on the meta device.
        method: of the layer, which gets what it computes with.
        device: of the layouts.
    """
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData

    for name in ("w13", "w2"):
        experts, rows, row_bytes = getattr(layer, f"{name}_weight").shape
        blocks = row_bytes // (BLOCK // 2)
        place: Any = {"dtype": torch.uint8, "device": device}
        values = torch.zeros(experts, *layout.value_storage_shape(rows, row_bytes), **place)
        scales = torch.zeros(experts, *layout.scale_storage_shape(rows, blocks), **place)
        values, scales = wrap(values, scales, (experts, rows, row_bytes))
        setattr(method, f"{name}_weight_triton_tensor", values)
        config = PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(rhs_data=InFlexData()))
        setattr(method, f"{name}_precision_config", config)

        delattr(layer, f"{name}_weight")
        bias = torch.zeros(experts, rows, dtype=torch.float32, device=device)
        delattr(layer, f"{name}_weight_bias")
        parameter = torch.nn.Parameter(bias, requires_grad=False)
        layer.register_parameter(f"{name}_weight_bias", parameter)
    return take_over(layer, method)


def wrap(values: Tensor, scales: Tensor, shape: tuple[int, int, int]) -> tuple[Any, Any]:
    """Return layouts in memory as triton_kernels' tensors, the same as ``_swizzle_mxfp4`` of SGLang does.

    Args:
        values: uint8 [experts, *value_storage_shape].
        scales: uint8 [experts, *scale_storage_shape].
        shape: experts, rows and bytes of a row of the matrices.
    """
    from triton_kernels.tensor import FP4, Storage
    from triton_kernels.tensor import Tensor as KernelTensor
    from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout

    experts, rows, row_bytes = shape
    packed_shape = torch.Size((experts, row_bytes, rows))
    scale_shape = torch.Size((experts, row_bytes // (BLOCK // 2), rows))
    value_layout = HopperMXValueLayout(packed_shape, mx_axis=1)
    scale_layout = HopperMXScaleLayout(scale_shape, mx_axis=1, num_warps=WARPS)
    its_values = KernelTensor(
        Storage(values.mT, value_layout), dtype=FP4, shape=[experts, 2 * row_bytes, rows]
    )
    return its_values, KernelTensor(Storage(scales.mT, scale_layout), shape=list(scale_shape))


def take_over(layer: Any, method: Any) -> Experts:
    """Describe the experts of a layer that has its layouts, and free the scales that SGLang makes
    beside them.

    Raises:
        RuntimeError: naming what is otherwise than in SGLang 0.5.17.
    """
    matrices = {
        "w13_weight": method.w13_weight_triton_tensor,
        "w13_weight_scale": method.w13_precision_config.weight_scale,
        "w2_weight": method.w2_weight_triton_tensor,
        "w2_weight_scale": method.w2_precision_config.weight_scale,
    }
    storage = {name: _storage_of(name, tensor) for name, tensor in matrices.items()}
    for name in ("w13_weight_bias", "w2_weight_bias"):
        storage[name] = getattr(layer, name).data

    if layer.moe_ep_size != 1:
        raise RuntimeError(f"MXFP4 experts are synced with --ep-size 1, not {layer.moe_ep_size}")
    experts = Experts(
        prefix="",
        storage=storage,
        shard=Shard.of(layer.moe_tp_rank, layer.moe_tp_size, _intermediate_size(layer)),
        intermediate_size=_intermediate_size(layer),
        hidden_size=method.hidden_size,
        padded_intermediate_size=method.intermediate_size_per_partition,
    )
    for name in ("w13_weight", "w2_weight"):
        rows, inputs = experts.shape(name, padded=True)
        _check_shape(name, storage[name], layout.value_storage_shape(rows, inputs // 2))
        scale_shape = layout.scale_storage_shape(rows, inputs // BLOCK)
        _check_shape(f"{name}_scale", storage[f"{name}_scale"], scale_shape)

    # SGLang does not read them, and would load into them without a word.
    del layer.w13_weight_scale, layer.w2_weight_scale
    return experts


def _intermediate_size(layer: Any) -> int:
    size: int = layer.intermediate_size_per_partition * layer.moe_tp_size
    return size


def _storage_of(name: str, tensor: Any) -> Tensor:
    """Return the memory of a tensor of triton_kernels, output-major as the layouts make it."""
    kind = type(tensor.storage.layout).__name__
    expected = "HopperMXScaleLayout" if name.endswith("_scale") else "HopperMXValueLayout"
    memory: Tensor = tensor.storage.data.mT
    if kind != expected or not memory.is_contiguous() or memory.dtype != torch.uint8:
        raise RuntimeError(
            f"{name} has layout {kind} in {memory.mT.dtype} {list(memory.mT.shape)} with strides "
            f"{memory.mT.stride()}, expected {expected} in uint8, the transpose contiguous: MXFP4 experts are "
            "synced on Hopper GPUs only"
        )
    return memory


def _check_shape(name: str, storage: Tensor, expected: tuple[int, int]) -> None:
    if tuple(storage.shape[1:]) != expected:
        raise RuntimeError(
            f"{name} has storage {list(storage.shape[1:])} per expert, expected {list(expected)}"
        )


def compare_layouts(swizzle: Any, device: torch.device) -> None:
    """Compare SGLang's own layouts with ours, of odd sizes.

    Args:
        swizzle: ``_swizzle_mxfp4`` of SGLang.
        device: of the server.

    Raises:
        RuntimeError: if a byte differs.
    """
    # SGLang makes models with another default device.
    generator = torch.Generator("cpu").manual_seed(0)
    for rows, row_bytes in ((160, 176), (2880, 1440)):
        shape = (2, rows, row_bytes)
        packed = torch.randint(
            0, 256, shape, dtype=torch.uint8, device="cpu", generator=generator
        ).to(device)
        scales = packed[:, :, : row_bytes // 16].contiguous()
        values, _, swizzled_scales = swizzle(packed, scales, WARPS)

        ours = packed.new_full((2, *layout.value_storage_shape(rows, row_bytes)), 1)
        layout.swizzle_values(packed, ours)
        _compare(f"values {list(shape)}", ours, values)
        back, stale = layout.unswizzle_values(ours, rows, row_bytes)
        if stale or not torch.equal(back, packed):
            raise RuntimeError(f"values {list(shape)} do not come back from their layout")

        blocks = row_bytes // 16
        our_scales = packed.new_full((2, *layout.scale_storage_shape(rows, blocks)), 1)
        layout.swizzle_scales(scales, (rows, blocks), our_scales)
        _compare(f"scales {list(scales.shape)}", our_scales, swizzled_scales)
        back, stale = layout.unswizzle_scales(our_scales, rows, blocks, (rows, blocks))
        if stale or not torch.equal(back, scales):
            raise RuntimeError(f"scales {list(scales.shape)} do not come back from their layout")

        its_values, its_scales = wrap(ours, our_scales, shape)
        _compare_descriptions(f"values {list(shape)}", its_values, values)
        _compare_descriptions(f"scales {list(scales.shape)}", its_scales, swizzled_scales)


def _compare(name: str, ours: Tensor, theirs: Any) -> None:
    memory = theirs.storage.data.mT
    place = f"{type(theirs.storage.layout).__name__}, {list(memory.shape)}, {memory.stride()}"
    if ours.shape != memory.shape:
        raise RuntimeError(f"{name} are stored as {place}, expected {list(ours.shape)}")
    differing = (ours != memory).nonzero()
    if len(differing):
        raise RuntimeError(
            f"{name} are stored as {place}: {len(differing)} bytes are not where they should be, "
            f"the first at {differing[0].tolist()}: {int(memory[tuple(differing[0])])} for "
            f"{int(ours[tuple(differing[0])])}"
        )


def _compare_descriptions(name: str, ours: Any, theirs: Any) -> None:
    described = [
        (
            tensor.dtype,
            list(tensor.shape),
            list(tensor.shape_max),
            tensor.stride(),
            tensor.storage.layout,
        )
        for tensor in (ours, theirs)
    ]
    if described[0] != described[1]:
        raise RuntimeError(f"{name} are described as {described[1]}, expected {described[0]}")


# -- the model ------------------------------------------------------------------------------------


class SyncedModel:
    """A model that serves MXFP4 experts, and which tensors of a sync it has got."""

    def __init__(self, model: Any) -> None:
        self.experts: list[Experts] = []
        self._destinations: dict[str, tuple[Experts, str]] = {}
        self._others: set[str] = set()
        self._received: set[str] = set()

        names = {name for name, _ in model.named_parameters()}
        for prefix, module in model.named_modules():
            experts = getattr(getattr(module, "quant_method", None), "gptoss_experts", None)
            if experts is not None:
                self._add_experts(f"{prefix}.", experts)
                names -= {f"{prefix}.{name}" for name in SOURCES}
        for name in names:
            self._others |= set(_sources_of(name))

    def _add_experts(self, prefix: str, experts: Experts) -> None:
        named = replace(experts, prefix=prefix)
        self.experts.append(named)
        for name, source in SOURCES.items():
            self._destinations[f"{prefix}{source}"] = (named, name)

    def begin_sync(self) -> None:
        """Forget which tensors came."""
        self._received.clear()

    def end_sync(self) -> None:
        """Raise WrongWeights unless every tensor came since ``begin_sync``."""
        missing = sorted((self._others | self._destinations.keys()) - self._received)
        self._received.clear()
        if missing:
            raise WrongWeights(
                f"{len(missing)} tensors have not come, the first is {missing[0]}: a part of the sync was lost"
            )

    def load_experts(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load the experts' tensors of ``weights`` and yield the others.

        Raises:
            WrongWeights: naming a tensor that is unknown or comes twice.
        """
        for name, tensor in weights:
            if name not in self._destinations and name not in self._others:
                raise WrongWeights(f"the server's model has no tensor {name}")
            if name in self._received:
                raise WrongWeights(f"tensor {name} came twice")
            self._received.add(name)

            if name in self._destinations:
                experts, own_name = self._destinations[name]
                experts.load(own_name, tensor)
            else:
                yield name, tensor

    def checksums(self, hash_tensor: Any) -> dict[str, str]:
        """Hash the experts' tensors as they came, one after the other, by SGLang's names."""
        found = {}
        for experts in self.experts:
            for name in SOURCES:
                tensor, stale = experts.read(name)
                checksum = hash_tensor(tensor)
                if stale:
                    checksum = f"stale padding: {stale} elements"
                found[f"{experts.prefix}{name}"] = checksum
        return found


def _sources_of(name: str) -> list[str]:
    """Return the Hugging Face tensors that a parameter outside the experts is made of."""
    fused = re.fullmatch(r"(.*\.)qkv_proj(\..*)", name)
    if fused is None:
        return [name]
    return [f"{fused[1]}{part}_proj{fused[2]}" for part in "qkv"]


def is_starting(model: Any) -> bool:
    """Tell whether SGLang has not finished loading a model for the first time."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return any(
        hasattr(method, "gptoss_experts") and not hasattr(method, "gptoss_loaded")
        for method in methods
    )


def synced(model: Any) -> SyncedModel | None:
    """Return what is known of a model; None if it has no experts in their layouts."""
    known: SyncedModel | None = getattr(model, "gptoss_synced", None)
    if known is None:
        known = SyncedModel(model)
        if not known.experts:
            return None
        model.gptoss_synced = known
    return known


# -- SGLang's classes -----------------------------------------------------------------------------


def install() -> None:
    """Let SGLang's classes do the above."""
    _install_loading()
    _install_checker()
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
        with torch.device("meta"):
            original_create(self, layer, *arguments, **options)

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
        chosen.clear()
        result = original_forward(self, *arguments, **options)
        # [tokens, top_k] int16, by number of the expert. Inside a CUDA graph this becomes a part of it.
        for indices in chosen:
            topk.capture_routed_experts_if_allowed(self.topk_config, self.layer_id, indices)
        chosen.clear()
        return result

    topk.triton_kernels_topk = choose
    topk.TopK.forward_cuda = forward
