"""Names and shapes of the tensors of a weight sync."""

from converters.expert_adapters import changed_names, expert_adapter_shapes
from converters.hf_directory import written_shapes
from converters.hf_layouts import Shape
from megatron_gptoss.config import ModelConfig
from rl_loop.weight_sync.servers import SyncPlan


def synced_shapes(config: ModelConfig, plan: SyncPlan) -> dict[str, Shape]:
    """Return the shape of every tensor that a sync sends, by name.

    Args:
        config: configuration of the weights.
        plan: plan of the sync.
    """
    shapes = written_shapes(config, plan.mxfp4_experts)
    if plan.adapters_only:
        assert plan.adapter is not None
        # The servers hold the frozen base from an earlier sync with all tensors.
        changed = changed_names(config, plan.adapter)
        shapes = {name: shape for name, shape in shapes.items() if name in changed}
    return shapes | unmerged_shapes(config, plan)


def unmerged_shapes(config: ModelConfig, plan: SyncPlan) -> dict[str, Shape]:
    """Return the shapes of the expert adapters that a sync sends, by name.

    Args:
        config: configuration of the weights.
        plan: plan of the sync.
    """
    if plan.adapter is None:
        return {}
    return expert_adapter_shapes(config, plan.adapter.rank_of_experts(config))
