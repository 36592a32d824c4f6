"""The ``gptoss`` command. Arguments are checked before anything heavy is imported, so a mistake answers at once."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rl_loop.config import ConfigError, RlConfig, RunConfig, SftConfig, load_config
from rl_loop.run_directory import RunDirectoryError, RunWriteError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Agentic reinforcement learning for GPT-OSS on Megatron-Core.",
)
convert = typer.Typer(no_args_is_help=True, help="Hugging Face <-> Megatron checkpoints, without a GPU.")
app.add_typer(convert, name="convert")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/rl/tiny_retool.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace those of the file, such as optimizer.lr=1e-6."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run from its newest checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of the same name first.")]


class Precision(StrEnum):
    """Format of exported weights."""

    bf16 = "bf16"
    fp32 = "fp32"


def fail(message: object) -> typer.Exit:
    print(f"gptoss: {message}", file=sys.stderr)
    return typer.Exit(1)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Mistakes of the user end in a message; faults of ours keep their traceback."""
    try:
        yield
    except (ConfigError, RunDirectoryError, RunWriteError) as error:
        raise fail(error) from None
    except Exception as error:
        # imported late: these modules bring torch with them, and by now it is loaded anyway
        from rl_loop.run import user_errors

        if isinstance(error, user_errors()):
            raise fail(error) from None
        raise


def train(
    kind: type[RunConfig], run: Callable[..., Path], path: Path, overrides: list[str] | None, resume: bool, new: bool
) -> None:
    from launch.progress import TrainingProgress
    from rl_loop.run import Interrupted

    with errors_in_one_line():
        config = load_config(path, kind, overrides)
        try:
            directory = run(config, TrainingProgress, resume=resume, overwrite=new)
        except Interrupted as stop:
            command = " ".join(["gptoss", kind.command, str(path), *(overrides or []), "--resume"])
            print(f"{stop}\nto continue: {command}")
            raise typer.Exit(130) from None
        from launch.report import build_report

        print(f"report: {build_report(directory)}")
        if kind is RlConfig:
            print(f"evaluate the exported checkpoint: gptoss eval {path} --weights {directory / 'export'}")


@app.command()
def sft(path: ConfigFile, overrides: Overrides = None, resume: Resume = False, overwrite: Overwrite = False) -> None:
    """Supervised fine-tuning on demonstrations: the warm start of an RL run."""
    from rl_loop.run import run_sft

    train(SftConfig, run_sft, path, overrides, resume, overwrite)


@app.command()
def rl(path: ConfigFile, overrides: Overrides = None, resume: Resume = False, overwrite: Overwrite = False) -> None:
    """On-policy reinforcement learning: episodes, update, weight sync, and an exported checkpoint at the end."""
    from rl_loop.run import run_rl

    train(RlConfig, run_rl, path, overrides, resume, overwrite)


@app.command(name="eval")
def evaluate(
    path: ConfigFile,
    overrides: Overrides = None,
    weights: Annotated[
        Path | None, typer.Option(help="A Hugging Face directory; without it the config's initial_weights.")
    ] = None,
) -> None:
    """Held-out accuracy of a checkpoint: the tasks, tools and rewards of CONFIG, one episode per task."""
    with errors_in_one_line():
        config = load_config(path, RlConfig, overrides)
        from rl_loop.evaluation import evaluate_checkpoint

        for name, value in evaluate_checkpoint(config, weights).items():
            print(f"{name:24} {value:.4f}")


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="A run directory, such as runs/tiny_retool.")]) -> None:
    """Write report.html and curve.png of a finished or running run."""
    with errors_in_one_line():
        from launch.report import build_report

        print(build_report(run_dir))


@app.command()
def doctor() -> None:
    """Check that this machine has everything a run needs, and say what to do where it does not."""
    from launch.doctor import print_doctor

    raise typer.Exit(0 if print_doctor() else 1)


@convert.command("import")
def convert_import(
    hf_dir: Annotated[Path, typer.Argument(help="A Hugging Face GPT-OSS directory (safetensors, bf16 or fp32).")],
    megatron_dir: Annotated[Path, typer.Argument(help="The torch_dist checkpoint to write; must not exist.")],
) -> None:
    """Hugging Face -> Megatron torch_dist, loadable at any parallel layout."""
    with errors_in_one_line():
        from converters.torch_dist import import_checkpoint

        import_checkpoint(hf_dir, megatron_dir)
        print(megatron_dir)


@convert.command("export")
def convert_export(
    megatron_dir: Annotated[Path, typer.Argument(help="A torch_dist checkpoint: imported, or a step of a run.")],
    hf_dir: Annotated[Path, typer.Argument(help="The Hugging Face directory to write; must not exist.")],
    precision: Annotated[Precision, typer.Option("--format", help="Precision of the weights.")] = Precision.bf16,
    reference: Annotated[
        Path | None, typer.Option(help="A Hugging Face directory to copy tokenizer and generation files from.")
    ] = None,
) -> None:
    """Megatron torch_dist -> Hugging Face safetensors."""
    with errors_in_one_line():
        from converters.torch_dist import export_checkpoint

        export_checkpoint(megatron_dir, hf_dir, dtype=precision.value, tokenizer_source=reference)
        print(hf_dir)


@convert.command("verify")
def convert_verify(
    hf_dir: Annotated[Path, typer.Argument(help="The Hugging Face directory.")],
    megatron_dir: Annotated[Path, typer.Argument(help="The torch_dist checkpoint.")],
) -> None:
    """Compare every tensor of the two bit for bit."""
    with errors_in_one_line():
        from converters.torch_dist import verify

        result = verify(hf_dir, megatron_dir)
        print(result)
        raise typer.Exit(0 if result.equal else 1)


def main() -> None:
    # Megatron and torch announce at every import that Apex and CUDA are not there; `gptoss doctor` says it once
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    app()
