"""The ``gptoss`` command.

Arguments are checked before anything heavy is imported, so that a mistake is answered at once.
That is why most imports of this file are inside its functions.
"""

import logging
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core
from typer import Argument, Option

from launch.completion import complete_config, complete_override
from rl_loop.config.load import load_rl_config, load_run_config
from rl_loop.config.shipped import find_config
from rl_loop.logs import configure_logging


class ErrorsInOneLine(typer.core.TyperGroup):
    """Ends every failure in one line; that of a bug of ours names the file with the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            configure_logging()
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("gptoss: stopped", file=sys.stderr)
            raise typer.Exit(130) from None
        except Exception as error:
            # --help and wrong options are answered by typer itself, without waiting for torch.
            if type(error).__module__.split(".")[0] in ("typer", "click"):
                raise
            print_failure(error)
        raise typer.Exit(1)


def print_failure(error: Exception, directory: Path | None = None) -> None:
    """Print one line on standard error; where a traceback helps, write it into ``directory``."""
    from rl_loop.lifecycle.failures import explain

    print(f"gptoss: {explain(error, directory)}", file=sys.stderr)


PURPOSE = "Agentic reinforcement learning for GPT-OSS on Megatron-Core."
app = typer.Typer(
    cls=ErrorsInOneLine,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help=PURPOSE,
)


def print_version(wanted: bool) -> None:
    """Print the installed version, and end."""
    if wanted:
        from importlib.metadata import version

        print(f"gptoss {version('megatron-gptoss')}")
        raise typer.Exit()


@app.callback()
def options_of_all_commands(
    version: Annotated[
        bool,
        Option("--version", callback=print_version, is_eager=True, help="Print it, and end."),
    ] = False,
) -> None:
    pass


class GroupWithDefault(typer.core.TyperGroup):
    """Runs the command that was added first if the first argument is no command: ``gptoss launch
    CONFIG``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] != "--help" and not self._is_meant_as_command(args[0]):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)

    def _is_meant_as_command(self, word: str) -> bool:
        """Whether ``word`` is a subcommand, or a misspelled one rather than a configuration."""
        if word in self.commands:
            return True
        is_config = any(find_config(Path(word), folder).exists() for folder in ("rl", "sft"))
        return not is_config and bool(get_close_matches(word, self.commands))


launch = typer.Typer(
    cls=GroupWithDefault,
    no_args_is_help=True,
    help="gptoss launch CONFIG [KEY=VALUE]... [--cluster NAME]: start a run in the background, here or on Slurm. "
    "Options: gptoss launch start --help.",
)
app.add_typer(launch, name="launch")
convert = typer.Typer(
    no_args_is_help=True,
    help="Hugging Face <-> Megatron checkpoints, without a GPU.",
)
app.add_typer(convert, name="convert")
certificate = typer.Typer(
    cls=GroupWithDefault,
    no_args_is_help=True,
    help="gptoss certify SUBJECT: does a trainer or an engine compute GPT-OSS? "
    "Options: gptoss certify run --help.",
)
app.add_typer(certificate, name="certify")
data = typer.Typer(
    no_args_is_help=True,
    help="The conversations that `gptoss sft` learns.",
)
app.add_typer(data, name="data")

ConfigFile = Annotated[
    Path,
    Argument(
        metavar="CONFIG",
        help="A YAML file, such as configs/rl/tiny_retool.yaml, or the name of a shipped one.",
        autocompletion=complete_config,
    ),
]
TrainingCommand = Literal["rl", "sft"]
Precision = Literal["bf16", "fp32", "mxfp4"]
TrainingPrecision = Literal["bf16", "fp32"]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[KEY=VALUE]...",
        help="Replace values of the file: optimizer.lr=1e-6.",
        autocompletion=complete_override,
    ),
]
Resume = Annotated[
    bool,
    Option(
        "--resume",
        help="Continue the run from its newest checkpoint, with what CONFIG now says.",
    ),
]
ResumeOrNew = Annotated[
    bool,
    Option("--resume-or-new", help="Continue the run if there is one, else begin it."),
]
Overwrite = Annotated[
    bool,
    Option("--overwrite", help="Delete an earlier run of the same name first."),
]
OfSft = Annotated[bool, Option("--sft", help="CONFIG is one of `gptoss sft`.")]


def train(
    command: TrainingCommand,
    run: Callable[..., Path],
    path: Path,
    overrides: list[str] | None,
    **start_options: bool,
) -> Path:
    """Run a training command with its progress display and write the report; returns the run
    directory.

    ``run`` does what the command says; ``start_options`` are its resume, resume_or_new and
    overwrite."""
    from launch.output import outlive_output
    from launch.progress import TrainingProgress
    from rl_loop.run import Interrupted

    config = load_run_config(path, command, overrides)
    outlive_output(config.directory / "output.log")  # a run outlives its terminal

    try:
        directory = run(config, TrainingProgress, **start_options)
    except Interrupted as stop:
        # A run that was stopped before it began has left no directory, and nothing to go on from.
        print(stop)
        if config.directory.exists():
            resume = ["gptoss", command, str(path), *(overrides or []), "--resume"]
            print(f"to continue: {shlex.join(resume)}")
        raise typer.Exit(stop.exit_status) from None
    except Exception as error:
        print_failure(error, config.directory)
        raise typer.Exit(1) from None

    from launch.outcome import describe_outcome
    from launch.report import build_report  # imports matplotlib
    from rl_loop.tracking.run_directory import RunDirectory

    print(describe_outcome(RunDirectory(directory)))
    print(f"report: {build_report(directory)}")
    return directory


@app.command()
def sft(
    path: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_or_new: ResumeOrNew = False,
    overwrite: Overwrite = False,
) -> None:
    """Supervised fine-tuning on your conversations, or on demonstrations: the warm start of an RL
    run."""
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


@app.command()
def rl(
    path: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_or_new: ResumeOrNew = False,
    overwrite: Overwrite = False,
) -> None:
    """On-policy reinforcement learning: episodes, update, weight sync, and an exported checkpoint
    at the end."""
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
    print(f"evaluate the exported checkpoint: gptoss eval {path} --weights {directory / 'export'}")


@app.command(name="eval")
def evaluate(
    path: ConfigFile,
    overrides: Overrides = None,
    weights: Annotated[
        Path | None,
        Option(help="A Hugging Face directory; else the config's initial_weights."),
    ] = None,
    output: Annotated[
        Path | None,
        Option(help="JSONL of the episodes; else RUNS/NAME.evaluation.jsonl."),
    ] = None,
    baseline: Annotated[
        Path | None,
        Option(help="Episodes of another evaluation to compare with."),
    ] = None,
) -> None:
    """avg@k, pass@k and maj@k with 95 % confidence intervals on the held-out tasks of CONFIG, by
    category."""
    config = load_rl_config(path, overrides)
    episodes_file = output or config.output_dir / f"{config.name}.evaluation.jsonl"

    from rl_loop.lifecycle.start_checks import check_what_an_evaluation_needs
    from rl_loop.tasks.evaluation_records import read_evaluation

    # What is wrong with the arguments is said before the slow imports below.
    baseline_episodes = [] if baseline is None else read_evaluation(baseline)
    check_what_an_evaluation_needs(config, weights, episodes_file)

    from launch.evaluation_table import print_evaluation
    from rl_loop.run import run_evaluation

    episodes = run_evaluation(config, weights, episodes_file)
    print_evaluation(episodes, baseline_episodes)
    print(f"episodes: {episodes_file}")


@app.command()
def serve(
    path: Annotated[
        Path,
        Argument(
            metavar="CONFIG_OR_CHECKPOINT",
            help="A YAML file, the directory of a run, or a Hugging Face directory.",
        ),
    ],
    overrides: Overrides = None,
    weights: Annotated[
        Path | None,
        Option(help="A Hugging Face directory, Megatron checkpoint or run, instead of PATH's own."),
    ] = None,
    host: Annotated[
        str,
        Option(
            help="Address to listen on. Keys travel unencrypted: others than loopback need a proxy."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 for any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        Option(help="A key that clients may use, with conversations of its own; else one is made."),
    ] = None,
    name: Annotated[
        str | None,
        Option(help="What the model is called in answers; else as its family is."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        Option(min=1, help="Tokens of a conversation; else as many as the model has positions."),
    ] = None,
    history: Annotated[
        Literal["append", "harmony"],
        Option(help="Before a new turn of the user: every token so far, or what the format keeps."),
    ] = "harmony",
) -> None:
    """Serve a checkpoint over OpenAI's API: chat completions and responses."""
    from rl_loop.config.load import load_served_config

    config = load_served_config(path, overrides)

    from rl_loop.lifecycle.start_checks import check_what_a_server_needs

    check_what_a_server_needs(config, weights)

    from rl_loop.gateway.serve import ServeOptions
    from rl_loop.run import run_server

    name = name or config.model.model_type.replace("_", "-")
    options = ServeOptions(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        model=name,
        max_tokens=max_tokens,
        history=history,
    )

    run_server(config, options, partial(_print_address, name), weights)


def _print_address(name: str, base_url: str, keys: list[str]) -> None:
    print(f"serving {name} at {base_url}; Ctrl-C stops")
    for key in keys:
        print(f"API key: {key}", flush=True)


@app.command()
def report(
    run_dir: Annotated[Path, Argument(help="A run directory, such as runs/tiny_retool.")],
) -> None:
    """Write report.html and curve.png of a finished or running run."""
    from launch.report import build_report

    print(build_report(run_dir))


@app.command()
def view(
    runs: Annotated[
        list[Path] | None,
        Argument(metavar="[RUN]...", help="Run directories, or directories of them; else runs."),
    ] = None,
    host: Annotated[
        str,
        Option(help="The address to listen on. Any but this machine's own needs a token."),
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes any that is free.")] = 8642,
    token: Annotated[
        bool,
        Option("--token", help="Ask for a token here, too: other people use this machine."),
    ] = False,
) -> None:
    """Show runs in a browser while they go on: curves, health, every episode token by token."""
    from launch.viewer.server import open_server

    server = open_server(runs or [Path("runs")], host, port, token)
    print(f"{server.address} (Ctrl-C ends it)", flush=True)
    server.serve()


@app.command()
def plan(
    path: ConfigFile,
    overrides: Overrides = None,
    sft: OfSft = False,
    gpu: Annotated[
        str | None,
        Option("--gpu", help="h100, h200 or b200. Without it this machine's, or an H200."),
    ] = None,
    gpu_gb: Annotated[
        float | None,
        Option("--gpu-gb", help="Memory of one GPU, all of it, instead of --gpu."),
    ] = None,
    host_gb: Annotated[
        float | None,
        Option("--host-gb", help="Memory of a node, for offloaded optimizer state."),
    ] = None,
    tool_seconds: Annotated[
        float,
        Option("--tool-seconds", min=0, help="Of a tool call, for what max_staleness would bring."),
    ] = 0.0,
) -> None:
    """Say how the layout would run: the memory of a GPU in every phase, time, how layers
    communicate under context parallelism, and what rollouts that run ahead would bring. Exit code 1
    if the configuration does not fit."""
    rl = None if sft else load_rl_config(path, overrides)
    config = rl or load_run_config(path, "sft", overrides)
    from launch.gpus import planned_hardware
    from launch.plan import attention_plan, step_plan
    from launch.rollout_plan import run_ahead_plan
    from megatron_gptoss.planning.memory_advice import is_too_much, memory_plan

    hardware = planned_hardware(gpu, gpu_gb, host_gb)
    inputs = config.memory_inputs
    print(
        memory_plan(inputs, hardware),
        attention_plan(inputs, config.dtype),
        step_plan(inputs, hardware.gigabytes),
        sep="\n",
    )
    if rl is not None:
        staleness = rl.algorithm.max_staleness
        print(run_ahead_plan(rl.rollout, rl.memory_inputs, staleness, tool_seconds))
    raise typer.Exit(1 if is_too_much(inputs, hardware) else 0)


@app.command()
def config(
    path: ConfigFile,
    overrides: Overrides = None,
    sft: OfSft = False,
    changed: Annotated[bool, Option("--changed", help="Leave out what has its default.")] = False,
) -> None:
    """Every value of a configuration as it will be, and where it is from: a file, the command line
    or the default."""
    from launch.config_view import config_lines

    for line in config_lines(path, "sft" if sft else "rl", overrides, changed_only=changed):
        print(line)


@app.command()
def doctor(
    engine: Annotated[
        Path | None,
        Option(metavar="CONFIG", help="Compare its engine and trainer instead."),
    ] = None,
    overrides: Overrides = None,
    install_engine: Annotated[
        Path | None,
        Option(metavar="DIR", help="Install SGLang there instead, or finish what was begun."),
    ] = None,
) -> None:
    """Check that this machine has everything a run needs, and say what to do where it does not."""
    if install_engine is not None:
        from launch import engine_install

        python = engine_install.install_engine(install_engine, partial(print, flush=True))
        print(f"rollout.engine.python={python}")
        return
    if engine is not None:
        config = load_rl_config(engine, overrides)
        from rl_loop.run import run_engine_report

        print(run_engine_report(config))
        return
    from launch.doctor import print_doctor

    raise typer.Exit(0 if print_doctor() else 1)


@contextmanager
def bytes_bars(*titles: str) -> Iterator[list[Callable[[int, int], None]]]:
    """Show a progress bar with GB/s and the time left for each title, on a terminal.

    Yields a function for each title, to be called with (bytes done, bytes in all). A bar appears
    with its first call."""
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
    with Progress(*columns, disable=not sys.stderr.isatty(), transient=True) as bars:

        def updater(title: str) -> Callable[[int, int], None]:
            task = bars.add_task(title, total=None, visible=False, start=False)

            def update(done: int, total: int) -> None:
                # The speed counts from here: another bar may have been at work before.
                if not bars.tasks[task].started:
                    bars.start_task(task)
                bars.update(task, completed=done, total=total, visible=True)

            return update

        yield [updater(title) for title in titles]


CheckOption = Annotated[
    Literal["sample", "all"],
    Option(
        "--check",
        help="What is read back and compared: experts of one layer and all that is no expert, or all.",
    ),
]


@convert.command("import")
def convert_import(
    hf_dir: Annotated[
        Path,
        Argument(
            help="A model as safetensors: bf16 or fp32, of GPT-OSS also MXFP4 or OpenAI's original."
        ),
    ],
    megatron_dir: Annotated[
        Path,
        Argument(help="The torch_dist checkpoint to write; must not exist."),
    ],
    check: CheckOption = "sample",
) -> None:
    """Hugging Face -> Megatron torch_dist, loadable at any parallel layout."""
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
        Argument(help="A torch_dist checkpoint: imported, or a step of a run."),
    ],
    hf_dir: Annotated[Path, Argument(help="The Hugging Face directory to write; must not exist.")],
    precision: Annotated[Precision, Option("--format", help="Precision of the weights.")] = "bf16",
    reference: Annotated[
        Path | None,
        Option(help="The original: tokenizer, settings, scales of MXFP4."),
    ] = None,
    check: CheckOption = "sample",
) -> None:
    """Megatron torch_dist -> Hugging Face safetensors."""
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
    if report.losses:
        print(report)
    print(report.read_back)
    print(hf_dir)


@convert.command("export-adapter")
def convert_export_adapter(
    megatron_dir: Annotated[
        Path,
        Argument(help="A torch_dist checkpoint of adapters: a step of a run that trains them."),
    ],
    peft_dir: Annotated[Path, Argument(help="The PEFT directory to write; must not exist.")],
    base: Annotated[
        str | None,
        Option(help="Hugging Face name or directory of the base, for whoever loads the adapter."),
    ] = None,
) -> None:
    """Adapters of a checkpoint -> PEFT's adapter_config.json and safetensors."""
    from converters.adapter_checkpoint import export_adapter

    export_adapter(megatron_dir, peft_dir, base)
    print(peft_dir)


@convert.command("import-adapter")
def convert_import_adapter(
    peft_dir: Annotated[
        Path,
        Argument(help="An adapter in PEFT's format: adapter_config.json and safetensors."),
    ],
    megatron_dir: Annotated[
        Path,
        Argument(help="The torch_dist checkpoint of adapters to write; must not exist."),
    ],
    base: Annotated[
        Path,
        Option(help="The model that the adapter changes: GPT-OSS as safetensors."),
    ],
    precision: Annotated[
        TrainingPrecision,
        Option("--format", help="Precision in which a training will hold the base."),
    ] = "bf16",
) -> None:
    """PEFT's adapter_config.json and safetensors -> a checkpoint of adapters that knows its base."""
    from converters.adapter_checkpoint import import_adapter

    with bytes_bars("base  ") as [progress]:
        import_adapter(peft_dir, megatron_dir, base, dtype=precision, progress=progress)
    print(megatron_dir)


@convert.command("merge")
def convert_merge(
    hf_dir: Annotated[Path, Argument(help="The base: GPT-OSS as safetensors.")],
    adapter_dir: Annotated[
        Path,
        Argument(help="A torch_dist checkpoint of adapters, or an adapter in PEFT's format."),
    ],
    merged_dir: Annotated[Path, Argument(help="The directory to write; must not exist.")],
    precision: Annotated[
        Precision,
        Option(
            "--format",
            help="Precision of the training, and of what is written. mxfp4: of a training in bf16, "
            "whose merged experts are quantized.",
        ),
    ] = "bf16",
) -> None:
    """Hugging Face safetensors + adapters -> the merged model: in bf16 or fp32 bit for bit what was
    trained, in mxfp4 with the loss that is printed."""
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
    if report.tensors:
        print(report)
    print(merged_dir)


@convert.command("verify")
def convert_verify(
    hf_dir: Annotated[Path, Argument(help="The Hugging Face directory.")],
    megatron_dir: Annotated[Path, Argument(help="The torch_dist checkpoint.")],
) -> None:
    """Compare every tensor of the two bit for bit, and what the two models compute, layer by
    layer."""
    from converters.verify import verify

    with bytes_bars("verify") as [progress]:
        result = verify(hf_dir, megatron_dir, progress)
    print(result)
    raise typer.Exit(0 if result.equal else 1)


@data.command("preview")
def data_preview(
    path: ConfigFile,
    overrides: Overrides = None,
    source: Annotated[
        str | None,
        Option(help="One of data.sources; without it all."),
    ] = None,
    samples: Annotated[int, Option(min=0, help="How many to show of each source.")] = 2,
    conversations: Annotated[
        int,
        Option(min=1, help="How many to read of each source, for the figures."),
    ] = 1000,
) -> None:
    """Samples token by token with what is learned of them, lengths, and what is refused and why."""
    from rich.console import Console

    from launch.data_preview import print_preview
    from rl_loop.session import open_conversations

    codec, opened = open_conversations(load_run_config(path, "sft", overrides))
    with opened:
        print_preview(
            opened,
            codec,
            Console(),
            sources=opened.sources if source is None else [source],
            samples=samples,
            conversations=conversations,
        )


WeightsSize = Annotated[
    Literal["tiny", "small", "gpu"],
    Option(help="tiny: for tests. small: GPT-OSS's window and lengths. gpu: widths for kernels."),
]
StoredPrecision = Annotated[
    Literal["fp32", "bf16"],
    Option("--precision", help="In which weights are made, and the subject computes."),
]


@certificate.command("run")
def certify_run(
    subject: Annotated[
        str,
        Argument(
            help="transformers, trainer, MODULE:FUNCTION, or the URL of a server: SGLang's "
            "(http://127.0.0.1:30000), or one of OpenAI's completions (it ends with /v1).",
        ),
    ],
    weights: Annotated[
        Path | None,
        Option(
            help="What `gptoss certify prepare` wrote, or a Hugging Face directory. Without it "
            "weights are made; a server was started with those that are meant.",
        ),
    ] = None,
    size: WeightsSize = "small",
    precision: StoredPrecision = "fp32",
    deterministic: Annotated[
        bool,
        Option("--deterministic", help="The server claims equal bits: anything else fails."),
    ] = False,
    only: Annotated[
        list[str] | None,
        Option(help="A check to run, by name; may be given several times. Agreement always runs."),
    ] = None,
    out: Annotated[
        Path,
        Option(help="Where certificate.txt, certificate.json and certificate.html go."),
    ] = Path("certificate"),
) -> None:
    """Check everything that GPT-OSS's implementations get wrong, and name what is wrong. Exit code
    1 if a check fails."""
    from rl_loop.certify.run import CertifyOptions, certify, check_subject_name

    check_subject_name(subject, has_weights=weights is not None)

    from launch.certificate_page import write_certificate
    from rl_loop.certify.certificate import CheckResult
    from rl_loop.certify.model import prepared

    def show(result: CheckResult) -> None:
        print(f"{result.status.value:11}  {result.name}", file=sys.stderr, flush=True)

    with prepared(weights, size, precision) as directory:
        options = CertifyOptions(
            subject=subject,
            weights=directory,
            precision=precision,
            deterministic=deterministic,
            only=tuple(only or ()),
        )
        result = certify(options, show)
    print(result.to_text())
    print(f"certificate: {write_certificate(result, out)}")
    raise typer.Exit(0 if result.has_passed else 1)


@certificate.command("prepare")
def certify_prepare(
    directory: Annotated[Path, Argument(help="Gets first/ and second/, two models.")],
    size: WeightsSize = "small",
    precision: StoredPrecision = "fp32",
) -> None:
    """Make the weights of a certificate: for a server that has to be started with them."""
    from rl_loop.certify.model import FIRST, prepare

    prepare(directory, size, precision)
    print(directory / FIRST)


Name = Annotated[str, Argument(help="The name of the run: `name` of its configuration.")]


@launch.command("start")
def launch_start(
    path: ConfigFile,
    overrides: Overrides = None,
    cluster: Annotated[str, Option(help="A YAML file, or the name of a shipped one.")] = "local",
    nodes: Annotated[int | None, Option(help="Replaces `nodes` of the cluster.")] = None,
    sft: OfSft = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Print script, placement and plan; change nothing."),
    ] = False,
) -> None:
    """Check the cluster, copy the code as it is now, and start the run. It resumes by itself."""
    from launch import submit
    from launch.cluster import load_cluster

    cluster_config = load_cluster(cluster, nodes)
    config = load_run_config(path, "sft" if sft else "rl", overrides)
    config = submit.resolve_paths(config, cluster_config)
    if dry_run:
        print(submit.describe_launch(config, cluster_config))
        return

    run = submit.start(config, cluster_config)
    unit = "job" if run.kind == "slurm" else "process"
    print(f"{run.name}: {unit} {run.job} in {run.run_dir}")
    print(f"gptoss launch status {run.name} | logs {run.name} --follow | cancel {run.name}")


@launch.command("list")
def launch_list() -> None:
    """Runs that were launched from this machine, with their states."""
    from launch.jobs import describe_launches

    for line in describe_launches():
        print(line)


@launch.command("status")
def launch_status(name: Name) -> None:
    """State, step, attempts and the first error of each."""
    from launch.jobs import describe_status, find_launch

    print(describe_status(find_launch(name)))


@launch.command("logs")
def launch_logs(
    name: Name,
    attempt: Annotated[
        str | None,
        Option(help="As `status` names it; without it the newest."),
    ] = None,
    node: Annotated[
        str | None,
        Option(help="The log of this node instead of the driver's."),
    ] = None,
    lines: Annotated[int, Option(help="How many of the last lines.")] = 100,
    follow: Annotated[bool, Option("--follow", help="Go on as lines are written.")] = False,
) -> None:
    """What the run said."""
    from launch import jobs

    run = jobs.find_launch(name)
    for line in jobs.read_log(run, attempt=attempt, node=node, lines=lines, follow=follow):
        print(line, flush=follow)


@launch.command("cancel")
def launch_cancel(name: Name) -> None:
    """End a run and what is queued for it."""
    from launch import jobs

    print(jobs.cancel(jobs.find_launch(name)))


def main() -> None:
    """Run the command line; the entry point of the ``gptoss`` script."""
    # Megatron and torch announce at every import that Apex and CUDA are absent; `gptoss doctor`
    # says it once.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    app()
