"""MoE layers of SGLang 0.5.17 with experts in the layouts of triton_kernels."""

from dataclasses import replace
from typing import Any

import gptoss_hopper_layout as layout
import torch
from gptoss_adapted_moe import ADAPTER, AdapterSettings, allocate_adapter
from gptoss_expert_storage import BLOCK, ExpertShard, LayerExperts
from torch import Tensor


def allocate(layer: Any, method: Any, device: torch.device) -> LayerExperts:
    """Allocate the layouts of a layer's experts, which replace SGLang's parameters.

    Weights are zero until they are loaded, and padding stays zero.

    Args:
        layer: MoE layer whose parameters are on the meta device.
        method: quantization method of the layer. It gets the tensors for its forward pass.
        device: device of the layouts.
    """
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData

    for name in ("w13", "w2"):
        experts, rows, row_bytes = getattr(layer, f"{name}_weight").shape
        blocks = row_bytes // (BLOCK // 2)
        place: Any = {"dtype": torch.uint8, "device": device}
        values = torch.zeros(experts, *layout.value_storage_shape(rows, row_bytes), **place)
        scales = torch.zeros(experts, *layout.scale_storage_shape(rows, blocks), **place)

        # SGLang's forward pass reads these names, which its own loading would set.
        values, scales = wrap(values, scales, (experts, rows, row_bytes))
        config = PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(rhs_data=InFlexData()))
        setattr(method, f"{name}_weight_triton_tensor", values)
        setattr(method, f"{name}_precision_config", config)

        delattr(layer, f"{name}_weight")
        delattr(layer, f"{name}_weight_bias")
        # SGLang keeps the biases of experts in fp32.
        bias = torch.zeros(experts, rows, dtype=torch.float32, device=device)
        parameter = torch.nn.Parameter(bias, requires_grad=False)
        layer.register_parameter(f"{name}_weight_bias", parameter)
    return take_over(layer, method)


def wrap(values: Tensor, scales: Tensor, shape: tuple[int, int, int]) -> tuple[Any, Any]:
    """Wrap layouts in memory as tensors of triton_kernels.

    The result equals that of SGLang's ``_swizzle_mxfp4`` for the same number of warps.

    Args:
        values: uint8 [experts, *value_storage_shape].
        scales: uint8 [experts, *scale_storage_shape].
        shape: experts, rows, and bytes per row of the matrices.

    Returns:
        Values and scales.
    """
    from triton_kernels.tensor import FP4, Storage
    from triton_kernels.tensor import Tensor as KernelTensor
    from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout

    experts, rows, row_bytes = shape
    # triton_kernels describes matrices as input-major, [experts, inputs, outputs], and stores them
    # transposed. ``.mT`` is a view, so no byte moves.
    packed_shape = torch.Size((experts, row_bytes, rows))
    scale_shape = torch.Size((experts, row_bytes // (BLOCK // 2), rows))
    value_layout = HopperMXValueLayout(packed_shape, mx_axis=1)
    scale_layout = HopperMXScaleLayout(scale_shape, mx_axis=1, num_warps=layout.SCALE_WARPS)
    # A byte holds two values, and triton_kernels counts values.
    wrapped_values = KernelTensor(
        Storage(values.mT, value_layout), dtype=FP4, shape=[experts, 2 * row_bytes, rows]
    )
    wrapped_scales = KernelTensor(Storage(scales.mT, scale_layout), shape=list(scale_shape))
    return wrapped_values, wrapped_scales


def take_over(layer: Any, method: Any) -> LayerExperts:
    """Return the experts of a layer that has its layouts, and free SGLang's unused scales.

    Raises:
        RuntimeError: if the layer differs from SGLang 0.5.17. The message names the difference.
    """
    matrices = {
        "w13_weight": method.w13_weight_triton_tensor,
        "w13_weight_scale": method.w13_precision_config.weight_scale,
        "w2_weight": method.w2_weight_triton_tensor,
        "w2_weight_scale": method.w2_precision_config.weight_scale,
    }
    storage = {name: _get_storage(name, tensor) for name, tensor in matrices.items()}
    for name in ("w13_weight_bias", "w2_weight_bias"):
        storage[name] = getattr(layer, name).data

    if layer.moe_ep_size != 1:
        raise RuntimeError(
            f"MXFP4 experts support weight syncs only with --ep-size 1 (got {layer.moe_ep_size})"
        )
    experts = LayerExperts(
        prefix="",
        storage=storage,
        shard=ExpertShard.of(layer.moe_tp_rank, layer.moe_tp_size, _intermediate_size(layer)),
        intermediate_size=_intermediate_size(layer),
        hidden_size=method.hidden_size,
        padded_intermediate_size=method.intermediate_size_per_partition,
    )
    for name in ("w13_weight", "w2_weight"):
        rows, inputs = experts.shape(name, padded=True)
        _check_shape(name, storage[name], layout.value_storage_shape(rows, inputs // 2))
        scale_shape = layout.scale_storage_shape(rows, inputs // BLOCK)
        _check_shape(f"{name}_scale", storage[f"{name}_scale"], scale_shape)

    # SGLang does not compute with these parameters, but would load into them silently.
    del layer.w13_weight_scale, layer.w2_weight_scale
    settings = AdapterSettings.of_environment()
    return experts if settings is None else _with_adapters(experts, method, settings)


def _with_adapters(experts: LayerExperts, method: Any, settings: AdapterSettings) -> LayerExperts:
    """Allocate adapters for both matrices of a layer, and let their GEMMs add them."""
    storage = dict(experts.storage)
    for name in ("w13", "w2"):
        shape = (experts.count, *experts.shape(f"{name}_weight", padded=True))
        adapter = allocate_adapter(settings, shape, experts.storage[f"{name}_weight"].device)
        # SGLang passes only this object of a matrix to its GEMMs.
        setattr(getattr(method, f"{name}_precision_config"), ADAPTER, adapter)
        storage |= {f"{name}_lora_a": adapter.a, f"{name}_lora_b": adapter.b}
    return replace(experts, storage=storage, adapter_rank=settings.rank)


def _intermediate_size(layer: Any) -> int:
    size: int = layer.intermediate_size_per_partition * layer.moe_tp_size
    return size


def _get_storage(name: str, tensor: Any) -> Tensor:
    """Return the memory of a triton_kernels tensor, output-major and contiguous.

    Raises:
        RuntimeError: if its layout is not that of Hopper GPUs.
    """
    kind = type(tensor.storage.layout).__name__
    expected = "HopperMXScaleLayout" if name.endswith("_scale") else "HopperMXValueLayout"
    memory: Tensor = tensor.storage.data.mT
    if kind != expected or not memory.is_contiguous() or memory.dtype != torch.uint8:
        raise RuntimeError(
            f"{name} has layout {kind} in {memory.mT.dtype} {list(memory.mT.shape)} with strides "
            f"{memory.mT.stride()}, expected {expected} in uint8, the transpose contiguous. "
            "MXFP4 experts support weight syncs on Hopper GPUs only"
        )
    return memory


def _check_shape(name: str, storage: Tensor, expected: tuple[int, int]) -> None:
    if tuple(storage.shape[1:]) != expected:
        raise RuntimeError(
            f"{name} has storage {list(storage.shape[1:])} per expert, expected {list(expected)}"
        )


def compare_layouts(swizzle: Any, device: torch.device) -> None:
    """Compare SGLang's layouts with those of this plugin, for sizes that need padding.

    They differ only in the order of bits in a word of values, and in the offset of a scale's byte.

    Args:
        swizzle: ``_swizzle_mxfp4`` of SGLang.
        device: device of the server.

    Raises:
        RuntimeError: if a byte differs.
    """
    # On the CPU explicitly, because SGLang creates models with another default device.
    generator = torch.Generator("cpu").manual_seed(0)
    # A small matrix whose rows, bytes and blocks all need padding, and rows with the 2,880 inputs
    # of GPT-OSS.
    for rows, row_bytes in ((160, 176), (2800, 1440)):
        shape = (2, rows, row_bytes)
        packed = torch.randint(
            0, 256, shape, dtype=torch.uint8, device="cpu", generator=generator
        ).to(device)
        # Any bytes serve as scales.
        scales = packed[:, :, : row_bytes // 16].contiguous()
        their_values, _, their_scales = swizzle(packed, scales, layout.SCALE_WARPS)

        our_values = _compare_values(packed, their_values)
        our_scales = _compare_scales(scales, their_scales)

        wrapped_values, wrapped_scales = wrap(our_values, our_scales, shape)
        _compare_descriptions(f"values {list(shape)}", wrapped_values, their_values)
        _compare_descriptions(f"scales {list(scales.shape)}", wrapped_scales, their_scales)


def _compare_values(packed: Tensor, theirs: Any) -> Tensor:
    """Compare the plugin's layout of values [experts, rows, row_bytes] with SGLang's. Return it."""
    experts, rows, row_bytes = packed.shape
    name = f"values {list(packed.shape)}"

    # Filled with ones, so that padding that is not written is detected.
    ours = packed.new_full((experts, *layout.value_storage_shape(rows, row_bytes)), 1)
    layout.swizzle_values(packed, ours)
    memory = theirs.storage.data.mT
    expected = layout.to_plugin_bit_order(memory) if memory.shape == ours.shape else memory
    _compare_bytes(name, ours, expected, theirs)

    back, wrong = layout.unswizzle_values(ours, rows, row_bytes)
    if wrong or not torch.equal(back, packed):
        raise RuntimeError(f"{name} change when written to the layout and read back")
    return ours


def _compare_scales(scales: Tensor, theirs: Any) -> Tensor:
    """Compare the plugin's layout of scales [experts, rows, blocks] with SGLang's. Return it."""
    experts, rows, blocks = scales.shape
    name = f"scales {list(scales.shape)}"

    ours = scales.new_full((experts, *layout.scale_storage_shape(rows, blocks)), 1)
    layout.swizzle_scales(scales, (rows, blocks), ours)
    expected = theirs.storage.data.mT + layout.SCALE_BIAS  # modulo 256
    _compare_bytes(name, ours, expected, theirs)

    back, wrong = layout.unswizzle_scales(ours, rows, blocks, (rows, blocks))
    if wrong or not torch.equal(back, scales):
        raise RuntimeError(f"{name} change when written to the layout and read back")
    return ours


def _compare_bytes(name: str, ours: Tensor, expected: Tensor, theirs: Any) -> None:
    """Raise RuntimeError unless the layouts are equal.

    Args:
        name: name of the tensor for messages.
        ours: layout of this plugin.
        expected: SGLang's layout, converted to that of this plugin.
        theirs: SGLang's layout as a tensor of triton_kernels.
    """
    memory = theirs.storage.data.mT
    place = f"{type(theirs.storage.layout).__name__}, {list(memory.shape)}, {memory.stride()}"
    if ours.shape != memory.shape:
        raise RuntimeError(f"{name} are stored as {place}, expected {list(ours.shape)}")
    differing = (ours != expected).nonzero()
    if len(differing):
        raise RuntimeError(
            f"{name} are stored as {place}: {len(differing)} bytes are at wrong positions, the "
            f"first at {differing[0].tolist()}: {int(expected[tuple(differing[0])])} for "
            f"{int(ours[tuple(differing[0])])}"
        )


def _compare_descriptions(name: str, ours: Any, theirs: Any) -> None:
    our_description = _describe(ours)
    their_description = _describe(theirs)
    if our_description != their_description:
        raise RuntimeError(
            f"{name} have the description {their_description}, expected {our_description}"
        )


def _describe(tensor: Any) -> tuple[Any, ...]:
    """Return the properties by which triton_kernels chooses its kernels."""
    shape, largest_shape = list(tensor.shape), list(tensor.shape_max)
    return tensor.dtype, shape, largest_shape, tensor.stride(), tensor.storage.layout
