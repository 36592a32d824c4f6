"""``gptoss convert``: conversion between Hugging Face and Megatron checkpoints."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from typer import Argument, Option

from launch.cli.groups import JoinedHelpGroup

convert = typer.Typer(
    cls=JoinedHelpGroup,
    no_args_is_help=True,
    help="Convert between Hugging Face and Megatron checkpoints, without a GPU.",
)
Precision = Literal["bf16", "fp32", "mxfp4"]
TrainingPrecision = Literal["bf16", "fp32"]
CheckOption = Annotated[
    Literal["sample", "all"],
    Option(
        "--check",
        help="Scope of the comparison after writing. sample: everything but experts, and the "
        "experts of one layer. all: everything.",
    ),
]


@convert.command("import")
def convert_import(
    hf_dir: Annotated[
        Path,
        Argument(
            help="Model in safetensors: bf16 or fp32; for GPT-OSS also MXFP4 or OpenAI's format."
        ),
    ],
    megatron_dir: Annotated[
        Path,
        Argument(help="torch_dist checkpoint to write; must not exist."),
    ],
    check: CheckOption = "sample",
) -> None:
    """Convert Hugging Face weights to a torch_dist checkpoint, for any parallel layout."""
    # The two directions have mirrored arguments, so a mix-up is the most likely mistake.
    if is_megatron(hf_dir):
        reject_direction(hf_dir, "a Megatron checkpoint", "export", megatron_dir)
    from converters.torch_dist import import_checkpoint

    with bytes_bars("import", "check ") as (progress, checked):
        result = import_checkpoint(
            hf_dir,
            megatron_dir,
            progress=progress,
            check=check,
            check_progress=checked,
        )
    print(result)
    print(megatron_dir)


@convert.command("export")
def convert_export(
    megatron_dir: Annotated[
        Path,
        Argument(help="torch_dist checkpoint: imported, or a step of a run."),
    ],
    hf_dir: Annotated[Path, Argument(help="Hugging Face directory to write; must not exist.")],
    precision: Annotated[Precision, Option("--format", help="Precision of the weights.")] = "bf16",
    reference: Annotated[
        Path | None,
        Option(help="Original model, source of tokenizer, settings and MXFP4 scales."),
    ] = None,
    check: CheckOption = "sample",
) -> None:
    """Convert a torch_dist checkpoint to Hugging Face safetensors."""
    # Before the slow import of torch.
    if (megatron_dir / "config.json").exists() and not (megatron_dir / "metadata.json").exists():
        reject_direction(megatron_dir, "a Hugging Face directory", "import", hf_dir)
    from converters.torch_dist import export_checkpoint

    with bytes_bars("export", "check ") as (progress, checked):
        report = export_checkpoint(
            megatron_dir,
            hf_dir,
            dtype=precision,
            reference=reference,
            progress=progress,
            check=check,
            check_progress=checked,
        )
    # Only MXFP4 exports have rounding errors.
    if report.errors:
        print(report)
    print(report.read_back)
    _warn_without_tokenizer(
        hf_dir,
        "--reference copies them from a Hugging Face directory, such as the export of the run",
    )
    print(hf_dir)


@convert.command("export-adapter")
def convert_export_adapter(
    megatron_dir: Annotated[
        Path,
        Argument(help="torch_dist checkpoint of adapters: a step of a run that trains them."),
    ],
    peft_dir: Annotated[Path, Argument(help="PEFT directory to write; must not exist.")],
    base: Annotated[
        str | None,
        Option(help="Hugging Face name or directory of the base, for users of the adapter."),
    ] = None,
) -> None:
    """Convert the adapters of a checkpoint to PEFT's adapter_config.json and safetensors."""
    from converters.adapter_checkpoint import export_adapter

    export_adapter(megatron_dir, peft_dir, base)
    print(peft_dir)


@convert.command("import-adapter")
def convert_import_adapter(
    peft_dir: Annotated[
        Path,
        Argument(help="Adapter in PEFT's format: adapter_config.json and safetensors."),
    ],
    megatron_dir: Annotated[
        Path,
        Argument(help="torch_dist checkpoint of adapters to write; must not exist."),
    ],
    base: Annotated[
        Path,
        Option(help="Base model of the adapter: GPT-OSS in safetensors."),
    ],
    precision: Annotated[
        TrainingPrecision,
        Option("--format", help="Precision of the base in the training."),
    ] = "bf16",
) -> None:
    """Convert an adapter in PEFT's format to a checkpoint of adapters with a digest of its base."""
    from converters.adapter_checkpoint import import_adapter

    with bytes_bars("base  ") as [progress]:
        warnings = import_adapter(peft_dir, megatron_dir, base, dtype=precision, progress=progress)
    # Printed last, below the progress bar, so that they stay visible.
    for warning in warnings:
        print(f"warning: {warning}")
    print(megatron_dir)


@convert.command("merge")
def convert_merge(
    hf_dir: Annotated[Path, Argument(help="Base model: GPT-OSS in safetensors.")],
    adapter_dir: Annotated[
        Path,
        Argument(help="torch_dist checkpoint of adapters, or an adapter in PEFT's format."),
    ],
    merged_dir: Annotated[Path, Argument(help="Directory to write; must not exist.")],
    precision: Annotated[
        Precision,
        Option(
            "--format",
            help="Precision of training and result. mxfp4: for a training in bf16, with "
            "quantized experts in the result.",
        ),
    ] = "bf16",
) -> None:
    """Merge adapters into Hugging Face weights.

    The result in bf16 or fp32 equals the trained weights bit for bit. For mxfp4 the quantization
    loss is printed.
    """
    from converters.merge_adapter import merge_adapter

    with bytes_bars("merge", "check ") as (progress, checked):
        report = merge_adapter(
            hf_dir,
            adapter_dir,
            merged_dir,
            dtype=precision,
            progress=progress,
            check_progress=checked,
        )
    print(report)
    _warn_without_tokenizer(merged_dir, "BASE has none. Copy them from the released model")
    print(merged_dir)


@convert.command("upcycle")
def convert_upcycle(
    dense_dir: Annotated[
        Path,
        Argument(help="Llama or Qwen2.5 model in safetensors, with its tokenizer.json."),
    ],
    hf_dir: Annotated[Path, Argument(help="GPT-OSS directory to write; must not exist.")],
    experts: Annotated[int, Option(min=1, help="Experts per layer.")] = 4,
    active: Annotated[int, Option(min=1, help="Experts per token.")] = 2,
    window: Annotated[
        int,
        Option(min=1, help="Keys that a token sees in every second layer."),
    ] = 128,
    sink: Annotated[
        float,
        Option(help="Initial sink of every head. -30 gives it no probability."),
    ] = 0.0,
    expert_noise: Annotated[
        float,
        Option(min=0, help="Noise that separates the experts, relative to the weights' spread."),
    ] = 0.03,
    seed: Annotated[int, Option(help="Seed of noise and router.")] = 0,
    harmony: Annotated[
        bool,
        Option(help="Rename unused tokens of a ChatML tokenizer to Harmony's special tokens."),
    ] = False,
    text: Annotated[
        Path | None,
        Option(help="Text file on which activations and losses are measured. Default: built in."),
    ] = None,
    precision: Annotated[
        TrainingPrecision, Option("--format", help="Precision of the weights.")
    ] = "bf16",
) -> None:
    """Write a dense model as a GPT-OSS model that computes the same function.

    Every expert is a copy of the dense MLP (sparse upcycling). Prints what the clamps, windows and
    sinks of GPT-OSS change, in nats per token.
    """
    from converters.upcycling.architecture import UpcycleOptions
    from converters.upcycling.calibration_text import (
        CALIBRATION_TEXT,
        calibration_tokens,
        read_calibration_text,
    )
    from converters.upcycling.convert import upcycle
    from megatron_gptoss.config.precision import torch_dtype

    # Read text and tokenizer first, because the measurement takes minutes.
    measured_text = CALIBRATION_TEXT if text is None else read_calibration_text(text)
    tokens = calibration_tokens(dense_dir, measured_text)
    options = UpcycleOptions(
        num_experts=experts,
        experts_per_token=active,
        sliding_window=window,
        sink=sink,
        expert_noise=expert_noise,
        seed=seed,
        harmony=harmony,
    )
    with bytes_bars("measure", "write  ") as (measured, written):
        report = upcycle(
            dense_dir,
            hf_dir,
            options,
            tokens,
            torch_dtype(precision),
            progress=written,
            measure_progress=measured,
        )
    print(report)
    print(hf_dir)


@convert.command("verify")
def convert_verify(
    hf_dir: Annotated[Path, Argument(help="Hugging Face directory.")],
    megatron_dir: Annotated[Path, Argument(help="torch_dist checkpoint.")],
) -> None:
    """Compare all tensors bit for bit, and the outputs of every layer.

    The two arguments may be given in any order.
    """
    # Check before the slow imports. `convert export` takes the two in the other order.
    if is_megatron(hf_dir) and not is_megatron(megatron_dir):
        hf_dir, megatron_dir = megatron_dir, hf_dir
    from converters.verify import verify

    with bytes_bars("verify") as [progress]:
        result = verify(hf_dir, megatron_dir, progress)
    print(result)
    raise typer.Exit(0 if result.equal else 1)


def is_megatron(directory: Path) -> bool:
    """Return True if a directory is a torch_dist checkpoint."""
    # metadata.json is the mark of dist_checkpointing, config.json that of Hugging Face.
    return (directory / "metadata.json").exists() and not (directory / "config.json").exists()


def reject_direction(source: Path, kind: str, command: str, target: Path) -> NoReturn:
    """Raise ConversionError for a source that another command reads.

    Args:
        source: the source.
        kind: kind of the source.
        command: ``gptoss convert`` command that reads it.
        target: directory to write.
    """
    from converters.errors import ConversionError

    # Quoted, so that the user can paste the command.
    words = shlex.join(["gptoss", "convert", command, str(source), str(target)])
    raise ConversionError(f"{source}: is {kind}, which another command reads. Run `{words}`")


def _warn_without_tokenizer(directory: Path, remedy: str) -> None:
    """Print a note if a new model has no tokenizer."""
    from converters.model_extras import read_extras

    if not read_extras(directory).has_tokenizer:
        print(f"{directory} has no tokenizer and no chat template: {remedy}")


@contextmanager
def bytes_bars(*titles: str) -> Iterator[list[Callable[[int, int], None]]]:
    """Show a progress bar with GB/s and remaining time per title, on a terminal.

    Yields a function per title that takes (bytes done, total bytes). A bar appears at its first
    call.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    # Without a terminal, a bar would fill the log with control characters.
    with Progress(*columns, disable=not sys.stderr.isatty(), transient=True) as bars:

        def updater(title: str) -> Callable[[int, int], None]:
            # Hidden until its first call, because a conversion can fail before it begins to copy.
            task = bars.add_task(title, total=None, visible=False, start=False)

            def update(done: int, total: int) -> None:
                # Measure the speed from the first call, because another bar may have run before.
                if not bars.tasks[task].started:
                    bars.start_task(task)
                bars.update(task, completed=done, total=total, visible=True)

            return update

        yield [updater(title) for title in titles]
