"""``gptoss tinker``: the command that serves the Tinker API."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from launch.cli.arguments import ConfigFile, Overrides
from launch.cli.serving import Host, Port, read_keys

ApiKeyFile = Annotated[
    Path | None,
    Option(
        help="File with one API key per line, each beginning with tml-, readable by its owner only. "
        "Clients with different keys share no models. Default: create a key, keep and print it."
    ),
]


def tinker(
    path: ConfigFile,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Serve the Tinker training API: the official SDK trains adapters over one base."""
    from rl_loop.config.load import load_config
    from rl_loop.config.tinker import TinkerConfig

    # Every check runs before the import of the server, which loads torch.
    config = load_config(path, TinkerConfig, overrides)
    keys = read_keys(api_key_file) if api_key_file is not None else ()

    from rl_loop.lifecycle.start_checks import check_weights
    from rl_loop.tinker.serve import TinkerOptions, run_tinker

    if config.initial_weights is not None:
        check_weights("initial_weights", config.initial_weights, config.model)

    def print_address(url: str, used_keys: Sequence[str]) -> None:
        # Flushed, because a script may wait for these lines in a pipe.
        print(f"serving {config.tinker.base_model} to the Tinker SDK; Ctrl-C stops", flush=True)
        print(f"export TINKER_BASE_URL={url}", flush=True)
        # Keys of a file must not appear in logs.
        if not keys:
            print(f"export TINKER_API_KEY={used_keys[0]}", flush=True)

    run_tinker(config, TinkerOptions(host, port, keys), print_address)
