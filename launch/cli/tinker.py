"""``gptoss tinker``: the command that serves the Tinker API."""

from pathlib import Path
from typing import Annotated

from typer import Option

from launch.cli.arguments import ConfigFile, Overrides
from launch.cli.serving import Host, Port, read_keys

ApiKeyFile = Annotated[
    Path | None,
    Option(
        help="File with one API key that begins with tml-, readable by its owner only. Default: "
        "create a key and print it."
    ),
]


def tinker(
    path: ConfigFile,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Serve the Tinker training API: the official SDK trains one adapter at a time."""
    from rl_loop.config.load import load_config
    from rl_loop.config.tinker import TinkerConfig

    # Every check runs before the import of the server, which loads torch.
    config = load_config(path, TinkerConfig, overrides)
    key = None
    if api_key_file is not None:
        key = _single_key(api_key_file)

    from rl_loop.lifecycle.start_checks import check_weights
    from rl_loop.tinker.serve import TinkerOptions, run_tinker

    if config.initial_weights is not None:
        check_weights("initial_weights", config.initial_weights, config.model)

    def print_address(url: str, used_key: str) -> None:
        # Flushed, because a script may wait for these lines in a pipe.
        print(f"serving {config.tinker.base_model} to the Tinker SDK; Ctrl-C stops", flush=True)
        print(f"export TINKER_BASE_URL={url}", flush=True)
        # A key of a file must not appear in logs.
        if key is None:
            print(f"export TINKER_API_KEY={used_key}", flush=True)

    run_tinker(config, TinkerOptions(host, port, key), print_address)


def _single_key(path: Path) -> str:
    """Return the only key of a file."""
    from rl_loop.gateway.serve import ServeError

    keys = read_keys(path)
    if len(keys) != 1:
        raise ServeError(f"--api-key-file {path}: has {len(keys)} keys. All clients share one key")
    return keys[0]
