"""Commands that inspect a run, a configuration or a machine."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from launch.cli.arguments import ConfigFile, Overrides, SftOption


def report(
    run_dir: Annotated[Path, Argument(help="Run directory, such as runs/tiny_retool.")],
) -> None:
    """Write report.html and curve.png of a finished or running run."""
    from launch.report import build_report

    print(build_report(run_dir))


def view(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="[RUN]...", help="Run directories, or directories of runs. Default: runs."
        ),
    ] = None,
    host: Annotated[
        str,
        Option(help="Address to listen on."),
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 for a free port.")] = 8642,
    token: Annotated[
        bool,
        Option(help="Require the token in the printed address. Other hosts always require it."),
    ] = True,
) -> None:
    """Show runs in a browser: curves, health checks, and every episode token by token."""
    from launch.viewer.server import open_server

    # The address is printed before serving, which blocks. Port 0 gets its number here.
    server = open_server(runs or [Path("runs")], host, port, token)
    print(f"{server.address} (Ctrl-C stops)", flush=True)
    server.serve()


def plan(
    path: ConfigFile,
    overrides: Overrides = None,
    sft: SftOption = False,
    gpu: Annotated[
        str | None,
        Option(
            "--gpu",
            help="h100, h200 or b200. Default: this machine's GPU, else the configuration's "
            "gpu_gb, else h200.",
        ),
    ] = None,
    gpu_gb: Annotated[
        float | None,
        Option("--gpu-gb", help="Total memory of one GPU in GB (1e9 bytes), instead of --gpu."),
    ] = None,
    host_gb: Annotated[
        float | None,
        Option(
            "--host-gb",
            help="Memory of a node in GB, for offloaded optimizer state and checkpoints.",
        ),
    ] = None,
    tool_seconds: Annotated[
        float,
        Option(
            "--tool-seconds",
            min=0,
            help="Duration of a tool call in seconds, for the prediction of rollouts.",
        ),
    ] = 0.0,
    turn_tokens: Annotated[
        float | None,
        Option(
            "--turn-tokens",
            min=1,
            help="Mean sampled tokens of a turn. Default: half of an episode's maximum, over "
            "rollout.max_turns turns.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int,
        Option(
            "--prompt-tokens",
            min=1,
            help="Tokens that the samples of a task, or the conversations of SFT, have in common, "
            "for the prediction with training.share_prefixes.",
        ),
    ] = 240,
) -> None:
    """Print whether a configuration fits, its memory by phase, its time and faster layouts.

    Needs neither weights nor a GPU. Exit code 1 if the configuration does not fit.
    """
    from rl_loop.config.load import load_rl_config, load_run_config

    # Load the configuration before the imports of planning, so that mistakes appear at once.
    rl = None if sft else load_rl_config(path, overrides)
    config = rl or load_run_config(path, "sft", overrides)
    from launch.gpus import planned_hardware
    from launch.plan import attention_plan, disk_plan, shared_prompts, speed_notes, step_plan
    from launch.rollout_plan import loop_plan
    from megatron_gptoss.planning.memory_advice import exceeds_memory, memory_plan
    from rl_loop.config.rollout_advice import rollout_warnings
    from rl_loop.lifecycle.disk_checks import disk_need

    hardware = planned_hardware(gpu, gpu_gb, host_gb, config.gpu_gb)
    inputs = config.memory_inputs
    print(
        memory_plan(inputs, hardware),
        disk_plan(disk_need(config)),
        *speed_notes(hardware, config.gpu_gb),
        attention_plan(inputs, config.dtype),
        # Only supervised configurations have this key.
        step_plan(
            inputs,
            hardware.gigabytes,
            getattr(config, "sequences_per_step", None),
            shared_prompts(config, prompt_tokens),
        ),
        sep="\n",
    )
    # Supervised runs have no rollouts.
    if rl is not None:
        print(loop_plan(rl, hardware, tool_seconds, turn_tokens))
        warnings = rollout_warnings(
            rl.rollout, rl.model, rl.dtype, hardware.gigabytes, turn_tokens, rl.unmerged_adapter
        )
        for warning in warnings:
            print(f"warning: {warning}")
    raise typer.Exit(1 if exceeds_memory(inputs, hardware) else 0)


def config(
    path: ConfigFile,
    overrides: Overrides = None,
    sft: SftOption = False,
    changed: Annotated[bool, Option("--changed", help="Leave out defaults.")] = False,
) -> None:
    """Print every value of a configuration, and its origin: file, command line or default."""
    from launch.config_view import config_lines

    for line in config_lines(path, "sft" if sft else "rl", overrides, changed_only=changed):
        print(line)


def doctor(
    engine: Annotated[
        Path | None,
        Option(metavar="CONFIG", help="Compare engine and trainer of this configuration instead."),
    ] = None,
    overrides: Overrides = None,
    install_engine: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Install SGLang in this directory instead, or complete an installation.",
        ),
    ] = None,
) -> None:
    """Check that this machine has everything for a run, and print remedies for missing parts."""
    if install_engine is not None:
        from launch import engine_install

        python = engine_install.install_engine(install_engine, partial(print, flush=True))
        print(f"rollout.engine.python={python}")
        return
    if engine is not None:
        from rl_loop.config.load import load_rl_config

        config = load_rl_config(engine, overrides)
        from rl_loop.run import run_engine_report

        print(run_engine_report(config))
        return
    from launch.doctor import print_doctor

    raise typer.Exit(0 if print_doctor() else 1)
