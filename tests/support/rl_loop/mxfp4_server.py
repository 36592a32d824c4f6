"""The local server with MXFP4 experts, which the plugin's code loads, reads and hashes.

Objects with the same attributes, in main memory, replace SGLang's layers. Their layouts are those
of ``triton_kernel`` (``sglang_own_loading.py`` has the real ones).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from converters.names import hf_shapes
from megatron_gptoss.config import ModelConfig
from rl_loop.engines.sglang.config import PLUGIN
from tests.support.rl_loop.sglang_protocol import LocalServer, _bytes_hash, server_parameters

sys.path.insert(0, str(PLUGIN))
import gptoss_expert_storage as expert_storage
import gptoss_hopper_layout as layout
import gptoss_mxfp4_experts as plugin
from gptoss_expert_layers import take_over
from gptoss_synced_model import SyncedModel


class HopperMXValueLayout:
    """Has the name of triton_kernels' class."""


class HopperMXScaleLayout:
    """Has the name of triton_kernels' class."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def create_layer(model: ModelConfig, rank: int, ranks: int) -> tuple[Any, Any]:
    """Return the experts of a layer and their quantization method, as after a dummy load."""
    inner = round_up(model.intermediate_size // ranks, 64)
    matrices = {
        "w13": (2 * inner, model.hidden_size),
        "w2": (model.hidden_size, inner),
    }
    layer = torch.nn.Module()
    layer.layer_id = 0
    layer.moe_ep_size, layer.moe_tp_rank, layer.moe_tp_size = 1, rank, ranks
    layer.intermediate_size_per_partition = model.intermediate_size // ranks
    method = SimpleNamespace(hidden_size=model.hidden_size, intermediate_size_per_partition=inner)
    for name, (rows, inputs) in matrices.items():
        scales = torch.full((model.num_experts, rows, inputs // 32), 127, dtype=torch.uint8)
        layer.register_parameter(f"{name}_weight_scale", parameter(scales))
        layer.register_parameter(
            f"{name}_weight_bias", parameter(torch.zeros(model.num_experts, rows))
        )

        storage = torch.zeros(
            model.num_experts, *layout.value_storage_shape(rows, inputs // 2), dtype=torch.uint8
        )
        values = SimpleNamespace(data=storage.mT, layout=HopperMXValueLayout())
        setattr(method, f"{name}_weight_triton_tensor", SimpleNamespace(storage=values))

        storage = torch.empty(
            model.num_experts, *layout.scale_storage_shape(rows, inputs // 32), dtype=torch.uint8
        )
        layout.swizzle_scales(scales, (rows, inputs // 32), storage)
        kept = SimpleNamespace(data=storage.mT, layout=HopperMXScaleLayout())
        config = SimpleNamespace(weight_scale=SimpleNamespace(storage=kept))
        setattr(method, f"{name}_precision_config", config)
    return layer, method


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


class ServedModel(torch.nn.Module):
    """Parameters of one tensor-parallel rank under the names of SGLang's GPT-OSS."""

    def __init__(self, model: ModelConfig, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        zeros = {name: torch.zeros(shape) for name, shape in hf_shapes(model).items()}
        for name, tensor in server_parameters(zeros, rank, ranks).items():
            prefix, _, own_name = name.rpartition(".")
            if ".experts." not in name:
                self._module_at(prefix).register_parameter(own_name, parameter(tensor))

        for index in range(model.num_layers):
            layer, method = create_layer(model, rank, ranks)
            method.gptoss_experts = take_over(layer, method)
            layer.quant_method = method
            self._module_at(f"model.layers.{index}.mlp").add_module("experts", layer)

    def _module_at(self, path: str) -> torch.nn.Module:
        module: torch.nn.Module = self
        for name in path.split("."):
            if name not in module._modules:
                module.add_module(name, torch.nn.Module())
            module = module.get_submodule(name)
        return module


class Mxfp4Server(LocalServer):
    """A server with MXFP4 experts, on every rank as the plugin stores them."""

    def __init__(self, model: ModelConfig, ranks: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.ranks = ranks
        self.models = [ServedModel(model, rank, ranks) for rank in range(ranks)]
        self.synced = [SyncedModel(served) for served in self.models]

    def _load(self, tensors: dict[str, torch.Tensor]) -> web.Response:
        try:
            for synced in self.synced:
                for _ in synced.load_experts(tensors.items()):
                    pass
        except expert_storage.WrongWeightsError as error:
            message = f"Failed to update parameter online: {error}."
            return web.json_response({"success": False, "message": message}, status=400)
        self.weights |= tensors  # the model's next token is a function of all of them
        self._digest = None
        return web.json_response({"success": True, "message": "Success"})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        directory = Path((await request.json())["model_path"])
        tensors: dict[str, torch.Tensor] = {}
        for file in directory.glob("*.safetensors"):
            tensors |= load_file(file)
        return self._load(tensors)

    async def weights_checker(self, request: web.Request) -> web.Response:
        action = (await request.json())["action"]
        if action == "checksum":
            return await super().weights_checker(request)
        try:
            for synced in self.synced:
                if action == plugin.BEGIN_SYNC:
                    synced.begin_sync()
                else:
                    assert action.startswith(plugin.END_SYNC)
                    synced.end_sync(plugin.sent_tensors(action))
        except expert_storage.WrongWeightsError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": "Success."})

    def _current(self, rank: int) -> dict[str, str]:
        others = {name: t for name, t in self.weights.items() if ".experts." not in name}
        held = server_parameters(others, rank, self.ranks)
        hashes = {name: _bytes_hash(tensor) for name, tensor in held.items()}
        return hashes | self.synced[rank].checksums(_bytes_hash)

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        answer = await super().release_memory_occupation(request)
        for synced in self.synced:
            for experts in synced.experts:
                for tensor in experts.storage.values():
                    tensor.view(torch.uint8).random_(0, 256)
        return answer
