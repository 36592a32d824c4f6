"""``gptoss serve``: the command that serves a checkpoint."""

import logging
import stat
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from launch.cli.arguments import Overrides

logger = logging.getLogger(__name__)


Source = Annotated[
    Path,
    Argument(
        metavar="CONFIG_OR_CHECKPOINT",
        help="YAML file, run directory, or Hugging Face directory.",
    ),
]
Weights = Annotated[
    Path | None,
    Option(help="Hugging Face directory, Megatron checkpoint or run with other weights."),
]
Host = Annotated[
    str,
    Option(help="Address to listen on. Addresses other than loopback need a proxy with TLS."),
]
Port = Annotated[int, Option(help="Port to listen on; 0 for a free port.")]
ApiKeyFile = Annotated[
    Path | None,
    Option(
        help="File with one API key per line, readable by its owner only. Clients with different "
        "keys share no conversations. Default: create a key and print it."
    ),
]
Name = Annotated[str | None, Option(help="Model name in responses. Default: the model family.")]
MaxTokens = Annotated[
    int | None,
    Option(min=1, help="Maximum tokens of a conversation. Default: the model's maximum."),
]
History = Annotated[
    Literal["append", "harmony"],
    Option(
        help="Context of a new user turn. append: all earlier tokens. harmony: what the chat "
        "format keeps of earlier turns (Harmony: no reasoning)."
    ),
]


def serve(
    path: Source,
    overrides: Overrides = None,
    weights: Weights = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: ApiKeyFile = None,
    name: Name = None,
    max_tokens: MaxTokens = None,
    history: History = "harmony",
) -> None:
    """Serve a checkpoint over OpenAI's API: chat completions and responses."""
    from rl_loop.config.served import load_served_config

    # Every check runs before the import of the server, which loads torch.
    config = load_served_config(path, overrides)
    if weights is None:
        _log_served_weights(path, config.initial_weights)

    from rl_loop.lifecycle.start_checks import check_server_requirements
    from rl_loop.tasks.codec import with_tokenizer_from

    config = with_tokenizer_from(config, weights)
    check_server_requirements(config, weights)
    keys = read_keys(api_key_file) if api_key_file is not None else ()

    from rl_loop.gateway.serve import ServeOptions
    from rl_loop.run import run_server

    name = name or config.model.model_type.replace("_", "-")
    options = ServeOptions(
        host=host,
        port=port,
        api_keys=keys,
        model=name,
        max_tokens=max_tokens,
        history=history,
    )

    run_server(config, options, partial(_print_address, name, not keys), weights)


def _log_served_weights(run: Path, source: Path | None) -> None:
    """Log the step of a run's served weights, and how to serve newer ones.

    Args:
        run: run directory, or another argument of ``serve``.
        source: weights that the server reads.
    """
    from rl_loop.config.load import read_yaml
    from rl_loop.served_weights import choose_served_weights

    file = run / "config.yaml"
    if not file.exists():
        return
    served = choose_served_weights(run)
    if served.path != source:  # an override selects other weights
        return

    logger.info(served.description)
    warning = served.describe_newer_weights(
        base=str(read_yaml(file).get("initial_weights") or "BASE")
    )
    if warning is not None:
        logger.warning(warning)


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys of a file with one key per line.

    Raises:
        ServeError: if the file cannot be read, has no key, or other users can read it.
    """
    from rl_loop.gateway.serve import ServeError

    try:
        # Keys are passwords: refuse a file that another user can read.
        mode = stat.S_IMODE(path.stat().st_mode)
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"--api-key-file {path}: cannot be read ({error})") from None
    if mode & 0o077:
        raise ServeError(
            f"--api-key-file {path}: readable by other users (mode {mode:04o}). Run chmod 600 "
            f"{path}"
        )
    # Blank lines, such as one at the end of the file, are not keys.
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ServeError(f"--api-key-file {path}: has no key. Write one key per line")
    return keys


def _print_address(name: str, is_new: bool, base_url: str, keys: list[str]) -> None:
    """Print the address of the server, and keys that were created for it."""
    # Flushed, because a script may wait for this line in a pipe.
    print(f"serving {name} at {base_url}; Ctrl-C stops", flush=True)
    # Keys of a file are known to the user and must not appear in logs.
    if is_new:
        for key in keys:
            print(f"API key: {key}", flush=True)
