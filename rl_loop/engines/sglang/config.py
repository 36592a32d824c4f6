"""Configuration of SGLang servers: ``rollout.engine`` with ``type: sglang``."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from megatron_gptoss.config import AdapterConfig, ModelConfig, Quantization
from megatron_gptoss.config.precision import DTYPE_NAMES
from megatron_gptoss.planning.memory_inputs import EngineMemory
from rl_loop.engines.backend import EngineConfig, EngineUnavailableError, ServerProcesses
from rl_loop.engines.sglang.colocated_memory import colocated_engine_memory
from rl_loop.engines.sglang.gpu_memory import (
    MAX_ADAPTER_RANK,
    ServerNeeds,
    windowed_cache_share,
)
from rl_loop.engines.sglang.prefills import (
    PREFILL_GRAPH_TOKENS,
    gather_passes,
)
from rl_loop.engines.sglang.python_environment import can_import, inherited_environment

PLUGIN = Path(__file__).parent / "plugin"
"""Directory with plugins for SGLang, part of every server's PYTHONPATH."""
PLUGIN_MODULE = "gptoss_sglang"
MOE_CONFIGS = Path(__file__).parent / "moe_configs"
"""Settings of SGLang's mixture-of-experts kernel for GPT-OSS's shapes, by GPU.

``benchmarks/experts/tuning.py`` writes them.
"""

RESERVED_ARGUMENTS = {
    "--api-key": "every run generates a random key for its servers",
    "--admin-api-key": "every run generates a random key for its servers",
    "--config": "servers read the run's key from such a file",
    "--tokenizer-worker-num": "SGLang would not check the key",
    "--grpc-port": "SGLang does not check the key on this port",
}
"""Options that would open a server to others: {option: reason why a user cannot set it}."""

BUCKET_BYTES = 1 << 30
MXFP4_BUCKET_BYTES = 2 << 30
"""Bucket size with MXFP4 experts.

The duration of their sync depends on the number of requests: 11 for the 20B instead of 20
(docs/quantization.md).
"""


class SglangConfig(EngineConfig):
    """SGLang 0.5.17 servers. Each runs in a separate process, in any Python environment."""

    type: Literal["sglang"] = "sglang"
    """Engine type."""
    servers: int = Field(1, gt=0)
    """Number of servers. All rollout workers share them."""
    tensor_parallel: int = Field(1, gt=0)
    """GPUs per server."""
    python: str = sys.executable
    """Python interpreter with SGLang installed. Its packages may differ from the trainer's."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the servers, added to those of this process. Its PYTHONPATH and
    VIRTUAL_ENV are left out.
    """
    arguments: list[str] = Field(default_factory=list)
    """Further arguments of ``sglang.launch_server``. The last value of a repeated option counts.
    Options that would open a server to others, such as ``--api-key``, are rejected.
    """
    attention_backend: Literal["fa3", "triton", "fa4", "trtllm_mha", "intel_amx"] = "fa3"
    """SGLang backend that computes attention sinks: fa3 for Hopper, trtllm_mha for Blackwell, or
    triton for any GPU, with a plugin that corrects its sliding window.
    """
    memory_fraction: float = Field(0.85, gt=0, lt=1)
    """Fraction of a GPU's total memory for a running server: weights, key/value cache, CUDA graphs,
    activations, process. With ``colocated``: the part that the trainer leaves, about half. On a
    CPU: SGLang's ``--mem-fraction-static``.
    """
    max_running_requests: int = Field(256, gt=0)
    """Requests that one server generates at a time. Further requests wait. CUDA graphs are captured
    for batches up to this size, which costs memory and start-up time.
    """
    deterministic: bool = False
    """Sample the same tokens for the same seed, independent of the batch. Slower, without
    prefix cache.
    """
    fp32_logits: bool | None = None
    """Keep logits in fp32, as the trainer does, instead of rounding them to bf16 (docs/sglang.md).
    null: true on GPUs without ``deterministic``.
    """
    weight_sync: Literal["nccl", "cuda_ipc", "gloo", "shared_memory", "disk"] = "nccl"
    """Transport of weights: nccl between GPUs, cuda_ipc within a GPU, gloo and shared_memory on
    CPUs, disk if trainer and servers share only the run's directory. Default: cuda_ipc with
    ``colocated``, else nccl.
    """
    bucket_bytes: int | None = Field(None, gt=0)
    """Maximum bytes of weights in flight, unless one tensor is larger. Gate and up projections of a
    layer are one tensor (bf16, 20B: 1.06 GB, 120B: 4.2 GB). A bucket is sent when it is more than
    half full. A server needs up to this much memory in addition to its model, the trainer twice as
    much. null: 1 GiB, or 2 GiB if ``quantization`` is set.
    """
    quantization: Quantization | None = None
    """Format of the servers' experts. null: bf16, which represents MXFP4 values exactly. mxfp4:
    4-bit blocks, 1/3 of the memory, Hopper GPUs only. Needs ``quantization: mxfp4``, and with ``adapter``
    also ``adapter.merge_experts: false``.
    """
    keep_weights: bool = False
    """Keep the weights of colocated servers in GPU memory while the trainer works. Syncs of unmerged adapters
    (``adapter.merge_experts: false``) then leave out the base.
    """
    colocated: bool = False
    """Run the servers on the trainer's GPUs. They release their memory while the trainer works."""
    prefill_graph_tokens: int = Field(0, ge=0)
    """Largest prefill, in tokens, that colocated servers with fa3 run as a CUDA graph, such as the
    outputs of tools. 0: none. Default for GPT-OSS: 512, which makes multi-turn rollouts of the 20B
    1.44x as fast. Graphs hold up to 64 requests. Other servers use SGLang's own graphs.
    """
    start_seconds: float = Field(1200.0, gt=0)
    """Seconds until a started server must be healthy."""
    sync_seconds: float = Field(40.0, gt=0)
    """Time limit in seconds for one bucket, for pausing and for resuming. weight_sync disk has only
    one bucket and gets 15 times as long. After the limit the sync fails and is retried.
    """

    @model_validator(mode="after")
    def _choose_weight_sync(self) -> Self:
        # NCCL's ranks cannot share a GPU, so the default transport is impossible here.
        if self.colocated and "weight_sync" not in self.model_fields_set:
            self.weight_sync = "cuda_ipc"
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_access()
        self._check_mxfp4_experts()
        self._check_logits()
        self._check_kernels()
        if self.colocated and self.weight_sync == "nccl":
            raise ValueError(
                "rollout.engine.weight_sync=nccl is not supported with colocated servers, "
                "because NCCL ranks cannot share a GPU. Set weight_sync=cuda_ipc"
            )
        self._check_prefill_graphs()
        # These raise ValueError for a value that is not a number.
        windowed_cache_share(self.arguments)
        gather_passes(self.arguments)
        self._check_kept_weights()
        return self

    def _check_kept_weights(self) -> None:
        if not self.keep_weights:
            return
        if not self.colocated:
            raise ValueError(
                "rollout.engine.keep_weights applies to colocated servers only. Other servers never release their "
                "weights. Leave it out"
            )
        if self.weight_sync == "disk":
            raise ValueError(
                "rollout.engine.keep_weights has no effect with weight_sync=disk, which sends all weights. Leave it "
                "out, or set weight_sync=cuda_ipc"
            )

    def _check_access(self) -> None:
        # Options may be written as "--name=value".
        names = {argument.partition("=")[0] for argument in self.arguments}
        for name in sorted(names & RESERVED_ARGUMENTS.keys()):
            raise ValueError(
                f"rollout.engine.arguments: {name} is not supported, because "
                f"{RESERVED_ARGUMENTS[name]}. Leave it out"
            )

    def _check_prefill_graphs(self) -> None:
        if not self.prefill_graph_tokens:
            return
        if not self.colocated:
            raise ValueError(
                "rollout.engine.prefill_graph_tokens applies to colocated servers only. Other "
                "servers use SGLang's own prefill graphs. Leave it out"
            )
        if self.attention_backend != "fa3" or self.deterministic:
            raise ValueError(
                "rollout.engine.prefill_graph_tokens needs attention_backend=fa3 and "
                "deterministic=false, because other attention cannot be captured with a prefix. "
                "Leave it out, or change these keys"
            )

    def _check_mxfp4_experts(self) -> None:
        names = {argument.partition("=")[0] for argument in self.arguments}
        if "--quantization" in names:
            raise ValueError(
                "rollout.engine.arguments: --quantization is not supported, because SGLang "
                "would ignore weight syncs. Set rollout.engine.quantization=mxfp4 for MXFP4 "
                "experts (docs/quantization.md)"
            )
        if self.quantization is None:
            return

        # The plugin does not write the layouts of other MoE runners or of expert parallelism.
        if names & {"--moe-runner-backend", "--ep-size", "--ep"}:
            raise ValueError(
                f"rollout.engine.quantization={self.quantization} supports weight syncs only "
                "with --moe-runner-backend triton_kernel and without expert parallelism. Leave "
                "these options out of rollout.engine.arguments"
            )
        # The layouts of the plugin are those of Hopper's tensor cores.
        if self.attention_backend in ("trtllm_mha", "intel_amx"):
            raise ValueError(
                f"rollout.engine.quantization={self.quantization} supports weight syncs on "
                f"Hopper GPUs only, but attention_backend={self.attention_backend} is for other "
                "hardware. Leave quantization out of rollout.engine"
            )

    def _check_logits(self) -> None:
        if self.fp32_logits and self.deterministic:
            raise ValueError(
                "rollout.engine.fp32_logits is not supported with deterministic, because its "
                "result depends on the batch size. Leave one of them out of rollout.engine"
            )

    def _check_kernels(self) -> None:
        if self.fp32_logits and self.is_on_cpus:
            raise ValueError(
                "rollout.engine.fp32_logits is for GPUs, but rollout.engine.arguments starts "
                "servers on CPUs. Leave fp32_logits out"
            )

    def for_model(self, model: ModelConfig) -> Self:
        # Captured prefills were tested with GPT-OSS only.
        captures_prefills = (
            self.colocated
            and self.weight_sync == "cuda_ipc"
            and self.attention_backend == "fa3"
            and not self.deterministic
            and model.model_type == "gpt_oss"
        )
        if captures_prefills and "prefill_graph_tokens" not in self.model_fields_set:
            return self.model_copy(update={"prefill_graph_tokens": PREFILL_GRAPH_TOKENS})
        return self

    @property
    def experts_format(self) -> Quantization | None:
        return self.quantization

    @property
    def has_mxfp4_experts(self) -> bool:
        return self.quantization is not None

    @property
    def max_unmerged_rank(self) -> int:
        return MAX_ADAPTER_RANK if self.has_mxfp4_experts else 0

    @property
    def keeps_weights(self) -> bool:
        return self.keep_weights

    @property
    def holds_base(self) -> bool:
        """True if servers keep their weights until the next sync, and the transport can leave them out."""
        return self.weight_sync != "disk" and (self.keep_weights or not self.colocated)

    @property
    def uses_fused_sampling(self) -> bool:
        """True if servers sample in one pass over the logits.

        This kernel draws the tokens of a batch from one generator. Deterministic servers have a
        seed per request.
        """
        return not self.deterministic and not self.is_on_cpus

    @property
    def uses_fused_window_attention(self) -> bool:
        """True if servers decode windowed layers with the plugin's kernel.

        It replaces fa3. The order of its sums differs from that of a prefill.
        """
        return self.attention_backend == "fa3" and not self.deterministic and not self.is_on_cpus

    @property
    def keeps_logits_in_fp32(self) -> bool:
        """True if servers do not round logits to bf16."""
        if self.fp32_logits is not None:
            return self.fp32_logits
        return not self.deterministic and not self.is_on_cpus

    @property
    def gather_passes(self) -> int:
        """Decoding steps, plus one, that requests wait at most for a common prefill."""
        return 1 if self.is_on_cpus else gather_passes(self.arguments)

    @property
    def is_on_cpus(self) -> bool:
        """True if servers run on CPUs."""
        # The two spellings of SGLang's --device cpu.
        asks_for_cpus = "cpu" in self.arguments or "--device=cpu" in self.arguments
        return asks_for_cpus or self.attention_backend == "intel_amx"

    @property
    def resolved_bucket_bytes(self) -> int:
        """``bucket_bytes``, or its default if it is null."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        if self.has_mxfp4_experts:
            return MXFP4_BUCKET_BYTES
        return BUCKET_BYTES

    @property
    def server_processes(self) -> ServerProcesses:
        return ServerProcesses(
            name="SGLang server",
            key="rollout.engine.servers",
            count=self.servers,
            gpus_each=self.tensor_parallel,
            share_trainer_gpus=self.colocated,
        )

    def server_needs(
        self, model: ModelConfig, dtype: str, adapter: AdapterConfig | None
    ) -> ServerNeeds:
        """Return the memory that a server needs on each of its GPUs."""
        return ServerNeeds.of(
            model,
            dtype,
            self.tensor_parallel,
            mxfp4_experts=self.has_mxfp4_experts,
            adapter=adapter,
        )

    def memory_on_trainer_gpus(
        self, model: ModelConfig, dtype: str, adapter: AdapterConfig | None = None
    ) -> EngineMemory | None:
        if not self.colocated:
            return None

        return colocated_engine_memory(
            weight_bytes=self.server_needs(model, dtype, adapter).weights,
            tensor_parallel=self.tensor_parallel,
            memory_fraction=self.memory_fraction,
            keep_weights=self.keep_weights,
            bucket_bytes=self.resolved_bucket_bytes,
            has_mxfp4_experts=self.has_mxfp4_experts,
        )

    @property
    def scores_at_any_temperature(self) -> bool:
        return False

    @property
    def takes_tensors(self) -> bool:
        return False

    def check_machine(self) -> None:
        """Check that ``python`` exists and can import SGLang, and the plugin if servers load it.

        Raises:
            EngineUnavailableError: if a check fails. The message contains the remedy.
        """
        python = shutil.which(self.python)
        if python is None:
            raise EngineUnavailableError(
                f"rollout.engine.python: {self.python} is not executable. `gptoss doctor "
                "--install-engine DIR` creates an environment with SGLang and prints the value "
                "for this key"
            )

        environment = inherited_environment() | self.environment
        if not can_import(python, "sglang", environment):
            raise EngineUnavailableError(
                f"rollout.engine.python: {python} has no SGLang. `gptoss doctor --install-engine "
                "DIR` installs it and prints the value for this key"
            )

        # A wrapper that replaces PYTHONPATH would start servers without the plugin's patches, and
        # without an error.
        if self.has_plugin and not can_import(python, PLUGIN_MODULE, environment):
            raise EngineUnavailableError(
                f"rollout.engine.python: {python} ignores PYTHONPATH, by which servers find the "
                f"plugin for {', '.join(self._patches)}. Let the wrapper keep PYTHONPATH"
            )

    @property
    def has_plugin(self) -> bool:
        """True if servers load the plugin."""
        return self.environment.get("SGLANG_PLUGINS") != "none"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the servers: ``env``, and the variables of the other settings.

        ``env`` has priority, except for PYTHONPATH: the plugin's path comes before that of ``env``.
        """
        variables = {"SGLANG_MOE_CONFIG_DIR": str(MOE_CONFIGS)}
        if self.deterministic:
            # With FlashInfer, SGLang computes the router of up to 128 tokens with another kernel
            # than that of more tokens, and the last bits of the results differ.
            variables["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
        if self.weight_sync == "nccl":
            # SGLang would set 0. NCCL in the server could then not open memory that the trainer's
            # NCCL has allocated ("invalid argument").
            variables["NCCL_CUMEM_ENABLE"] = os.environ.get("NCCL_CUMEM_ENABLE", "1")
        if self.colocated:
            # Without it SGLang keeps the memory of its CUDA graphs while it is paused.
            variables["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
        # A user may change the variables above, but not those below: servers would run unpatched.
        variables |= self.env

        variables["GPTOSS_SGLANG_PATCHES"] = ",".join(self._patches)
        paths = [str(PLUGIN)]
        if users_path := self.env.get("PYTHONPATH"):
            paths.append(users_path)
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        return variables

    @property
    def _patches(self) -> list[str]:
        """Names of the plugin's patches for these servers (``plugin/gptoss_sglang.py``)."""
        patches = ["hidden_key", "bound_store"]
        if self.attention_backend == "triton":
            patches.append("triton_window")
        if self.colocated:
            patches.append("paused_cache")

        if self.has_mxfp4_experts:
            patches += ["mxfp4_experts", "ptxas_override"]
            if not self.deterministic:
                # Its gates may differ from those of a prefill in the last bit.
                patches.append("fused_routing")
            # Their results have identical bits, so deterministic servers use them, too.
            patches += ["moe_occupancy", "small_batch_moe"]

        if not self.colocated:
            # Colocated servers have no running request when a sync begins.
            patches.append("fast_abort")
        if self.uses_fused_sampling:
            patches.append("fused_sampling")
        if self.uses_fused_window_attention:
            patches.append("fused_window_attention")
        if self.keeps_logits_in_fp32:
            patches.append("fp32_logits")
        return patches

    def describe_model(self, model: ModelConfig, dtype: str) -> dict[str, Any]:
        """Return the config.json for servers: architecture, dtype and quantization."""
        # Imported here, because it needs torch and reading a configuration does not.
        from converters.hf_layouts import QUANTIZATION_CONFIG

        description = model.to_hf_config(dtype=DTYPE_NAMES[dtype])
        if self.has_mxfp4_experts:
            description["quantization_config"] = QUANTIZATION_CONFIG
        return description
