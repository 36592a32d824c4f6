"""``gptoss play``: one episode in the terminal."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from launch.cli.arguments import ConfigFile, Overrides, SftOption


def play(
    path: ConfigFile,
    overrides: Overrides = None,
    policy: Annotated[
        Literal["scripted", "model", "me"],
        Option(
            help="scripted: the environment's `solve`. model: the weights of CONFIG, or its "
            "evaluation.endpoint. me: turns typed in the terminal."
        ),
    ] = "scripted",
    task: Annotated[int, Option(min=0, help="Position of the task.")] = 0,
    held_out: Annotated[
        bool, Option("--held-out", help="Play a held-out task instead of a training task.")
    ] = False,
    seed: Annotated[int, Option(min=0, help="Seed of the policy.")] = 0,
    weights: Annotated[
        Path | None,
        Option(help="Hugging Face directory, or a run. Default: initial_weights of CONFIG."),
    ] = None,
    tokens: Annotated[
        bool, Option("--tokens", help="Show a line per token: position, loss mask, id and text.")
    ] = False,
    sft: SftOption = False,
) -> None:
    """Play one episode step by step: prompt, turns, tool outputs, loss mask and reward.

    Exit code 1 if the episode is invalid or stopped before its end.
    """
    from rl_loop.config.load import load_run_config

    config = load_run_config(path, "sft" if sft else "rl", overrides)

    from rl_loop.lifecycle.start_checks import check_play_requirements
    from rl_loop.tasks.codec import with_tokenizer_from

    config = with_tokenizer_from(config, weights)
    # Before the slow imports below.
    check_play_requirements(config, weights, uses_model=policy == "model")

    from rich.console import Console

    from launch.played_episode import EpisodeTerminal
    from launch.standard_input import StandardInput
    from rl_loop.play.episode import PlayOptions, play_episode

    view = EpisodeTerminal(Console(), StandardInput(), list_tokens=tokens)
    options = PlayOptions(policy, task, held_out, seed, weights)
    is_valid = view.print_outcome(play_episode(config, options, view))
    raise typer.Exit(0 if is_valid else 1)
