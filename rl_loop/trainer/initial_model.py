"""Initial model of a trainer, with weights from files or random weights."""

from collections.abc import Callable
from pathlib import Path

import torch

from converters.adapter_checkpoint import Adapters, CheckpointAdapters
from converters.adapter_weights import load_adapter
from converters.hf_directory import HfDirectory, LazyExpertStack
from converters.mapping import ParameterMapping
from converters.megatron_checkpoint import MegatronCheckpoint
from converters.model_weights import load_hf_weights
from converters.mxfp4_tensors import rounded_to_mxfp4
from converters.names import hf_shapes, parameter_mappings
from converters.peft_directory import PeftDirectory
from converters.peft_settings import PEFT_CONFIG_FILE
from converters.random_weights import random_hf_weights
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.checkpoint.loader import check_undamaged, load_model_weights
from megatron_gptoss.config import Quantization
from megatron_gptoss.config.precision import torch_dtype
from megatron_gptoss.layers.adapters import initialize_adapters
from megatron_gptoss.model import build_model
from rl_loop.config.partial_configs import TrainerConfig


def build_initial_model(
    settings: TrainerConfig, quantization: Quantization | None
) -> torch.nn.Module:
    """Build this rank's part of the initial model. Collective.

    New adapters do not change the output of the base.

    Args:
        settings: settings of the trainer.
        quantization: format of the experts or, with adapters, of the frozen base's experts. None
            for ``settings.dtype``.

    Raises:
        ConversionError, CheckpointError: a file, key or tensor does not fit, an MXFP4 base has a
            value that MXFP4 cannot represent, or initial adapters have different settings or a
            different base. The message names the file, key or tensor.
    """
    absent = settings.ablation.without
    model = build_model(
        settings.model,
        settings.parallel,
        torch_dtype(settings.dtype),
        adapter=settings.adapter,
        quantization=quantization,
        router_noise=settings.ablation.router_noise,
        sinks="trainer_sinks" not in absent,
        sink_gradient="sink_gradient" not in absent,
        sink_backward="sink_backward" not in absent,
    )
    _load_base(model, settings, quantization)
    if settings.initial_adapter is not None:
        source = _open_adapters(settings.initial_adapter, settings)
        load_adapter(model, settings.model, source)
    elif settings.adapter is not None:
        initialize_adapters(model, settings.seed)
    return model


def build_teacher(settings: TrainerConfig, directory: Path) -> torch.nn.Module:
    """Build this rank's part of a teacher, in the layout of the policy. Collective.

    Args:
        settings: settings of the trainer.
        directory: Hugging Face directory of the teacher.

    Raises:
        ConversionError: a file, key or tensor does not fit. The message names it.
    """
    source = HfDirectory(directory)
    parallel = settings.parallel.for_teacher(source.config)
    model = build_model(source.config, parallel, torch_dtype(settings.dtype))
    load_hf_weights(model, source.config, source.view)
    return model


def _load_base(
    model: torch.nn.Module, settings: TrainerConfig, quantization: Quantization | None
) -> None:
    """Fill all weights of ``model`` except adapters. Collective."""
    source = settings.initial_weights
    if source is None:
        load_hf_weights(model, settings.model, _random_weights(settings, quantization))
    # Only Hugging Face directories have this file. Runs and checkpoints do not.
    elif (source / "config.json").exists():
        load_hf_weights(model, settings.model, HfDirectory(source).view)
    else:
        # ``source`` is a run, or one of its checkpoints.
        checkpoint = latest_checkpoint(source / "checkpoints") or source
        if settings.adapter is None:
            load_model_weights(checkpoint, model)
        else:
            # Megatron's loader would also look for the keys of adapters.
            check_undamaged(checkpoint)
            # Not verified again: the ranks have just checked the files together.
            tensors = CheckpointTensors(MegatronCheckpoint(checkpoint, verify=False))
            load_hf_weights(model, settings.model, tensors.view)


def _open_adapters(path: Path, settings: TrainerConfig) -> Adapters:
    """Open the adapters of a run, of a checkpoint or of a directory in PEFT's format."""
    if (path / PEFT_CONFIG_FILE).exists():
        peft = PeftDirectory(path, settings.model)
        source = settings.initial_weights
        if source is not None and (source / "config.json").exists():
            # Copies of base tensors are PEFT's only data about the base, and not always present.
            peft.check_base_copies(HfDirectory(source).get)
        return peft
    return CheckpointAdapters(latest_checkpoint(path / "checkpoints") or path)


def _random_weights(
    settings: TrainerConfig, quantization: Quantization | None
) -> Callable[[str], torch.Tensor]:
    """Return a source of random tensors, by Hugging Face name, that the base can represent."""
    draw = random_hf_weights(settings.model, settings.seed)
    if settings.adapter is None or quantization is None:
        return draw

    # A frozen base is stored as MXFP4, which cannot represent arbitrary values.
    return lambda name: rounded_to_mxfp4(name, draw(name))


class CheckpointTensors:
    """Weights of a torch_dist checkpoint by Hugging Face name, read on access."""

    def __init__(self, checkpoint: MegatronCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._shapes = hf_shapes(checkpoint.config)
        self._mappings: dict[str, list[ParameterMapping]] = {}
        for mapping in parameter_mappings(checkpoint.config).values():
            for name in mapping.hf_names:
                self._mappings.setdefault(name, []).append(mapping)

    def view(self, name: str) -> torch.Tensor | LazyExpertStack:
        """Return a tensor in its Hugging Face shape, or a stack that reads each expert on access.

        Raises:
            KeyError: the checkpoint's model has no tensor of this name.
        """
        mappings = self._mappings[name]
        if mappings[0].expert is None:
            return self._read(mappings[0], name)
        # All experts of a layer would need several times the memory of one.
        return LazyExpertStack(
            self._shapes[name], read=lambda expert: self._read(mappings[expert], name)
        )

    def _read(self, mapping: ParameterMapping, name: str) -> torch.Tensor:
        return mapping.named_parts(self._checkpoint.parameter(mapping))[name]
