"""Commands that train or evaluate a policy: sft, rl, eval."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from launch.cli.arguments import (
    ConfigFile,
    Overrides,
    Overwrite,
    Resume,
    ResumeOrNew,
    TrainingCommand,
)
from launch.cli.groups import print_failure


def train(
    command: TrainingCommand,
    run: Callable[..., Path],
    path: Path,
    overrides: list[str] | None,
    **start_options: bool,
) -> Path:
    """Run a training command with its progress display, and write the report.

    Args:
        command: command whose configuration is loaded.
        run: implementation of the command.
        path: configuration file.
        overrides: KEY=VALUE of the command line.
        **start_options: resume, resume_or_new and overwrite of ``run``.

    Returns:
        Run directory.
    """
    from launch.output import keep_output_in_log, make_files_private
    from launch.progress import TrainingProgress, describe_outcome
    from rl_loop.config.load import load_run_config
    from rl_loop.run import RunInterrupted

    config = load_run_config(path, command, overrides)
    make_files_private()
    keep_output_in_log(config.directory / "output.log")  # a run outlives its terminal

    try:
        directory = run(config, TrainingProgress, **start_options)
    except RunInterrupted as stop:
        # Without a directory, the run was stopped before it began and cannot be resumed.
        print(stop)
        if config.directory.exists():
            resume = ["gptoss", command, str(path), *(overrides or []), "--resume"]
            print(f"to continue: {shlex.join(resume)}")
        raise typer.Exit(stop.exit_status) from None
    # The traceback goes to the run's directory, because the terminal may be closed.
    except Exception as error:
        print_failure(error, config.directory)
        raise typer.Exit(1) from None

    from launch.report import build_report  # imports matplotlib
    from rl_loop.tracking.run_directory import RunDirectory

    print(describe_outcome(RunDirectory(directory)))
    print(f"report: {build_report(directory)}")
    return directory


def sft(
    path: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_or_new: ResumeOrNew = False,
    overwrite: Overwrite = False,
) -> None:
    """Fine-tune on conversations or demonstrations, for example as warm start of an RL run."""
    from rl_loop.run import run_sft

    train(
        "sft",
        run_sft,
        path,
        overrides,
        resume=resume,
        resume_or_new=resume_or_new,
        overwrite=overwrite,
    )


def rl(
    path: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_or_new: ResumeOrNew = False,
    overwrite: Overwrite = False,
) -> None:
    """Train with reinforcement learning, and export the model at the end."""
    from rl_loop.run import run_rl

    directory = train(
        "rl",
        run_rl,
        path,
        overrides,
        resume=resume,
        resume_or_new=resume_or_new,
        overwrite=overwrite,
    )
    # The run's own configuration, because PATH may be gone, as in a launched job.
    evaluation = ["gptoss", "eval", str(directory / "config.yaml")]
    evaluation += ["--weights", str(directory / "export")]
    print(f"evaluate the exported checkpoint: {shlex.join(evaluation)}")


def evaluate(
    path: ConfigFile,
    overrides: Overrides = None,
    weights: Annotated[
        Path | None,
        Option(help="Hugging Face directory, or a run. Default: initial_weights of CONFIG."),
    ] = None,
    output: Annotated[
        Path | None,
        Option(help="JSONL file for the episodes. Default: RUNS/NAME.evaluation.jsonl."),
    ] = None,
    baseline: Annotated[
        Path | None,
        Option(help="JSONL file of another evaluation to compare with."),
    ] = None,
) -> None:
    """Evaluate on the held-out tasks or conversations of CONFIG, with 95% intervals."""
    from rl_loop.config.run import SftConfig
    from rl_loop.config.served import load_evaluated_config

    config = load_evaluated_config(path, overrides)
    # Next to the run's directory and not in it, because no run needs to exist.
    episodes_file = output or config.output_dir / f"{config.name}.evaluation.jsonl"

    from rl_loop.lifecycle.start_checks import check_evaluation_requirements
    from rl_loop.tasks.codec import with_tokenizer_from
    from rl_loop.tasks.evaluation_records import read_evaluation

    config = with_tokenizer_from(config, weights)
    # Report invalid arguments before the slow imports below.
    baseline_episodes = [] if baseline is None else read_evaluation(baseline)
    check_evaluation_requirements(config, weights, episodes_file)

    from launch import evaluation_table
    from rl_loop.run import run_evaluation

    episodes = run_evaluation(config, weights, episodes_file)
    if isinstance(config, SftConfig):
        evaluation_table.print_chat_evaluation(episodes, baseline_episodes)
    else:
        evaluation_table.print_evaluation(episodes, baseline_episodes)
    print(f"episodes: {episodes_file}")
