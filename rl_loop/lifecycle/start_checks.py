"""What a run needs, checked in a second or two, before Ray, torch or any weights are loaded.

Every check raises ``CannotStart`` with one line that names the key and what to do. Nothing is written. What only the
real thing can tell (whether the weights' values can be read, whether a server gets healthy) is found later."""

import importlib.util
import json
import math
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_gptoss.config import ModelConfig
from rl_loop.cluster.placement import is_placed
from rl_loop.config.errors import CannotStart
from rl_loop.config.run import RlConfig, RunConfig
from rl_loop.config.tasks import SourceConfig
from rl_loop.environments import environment_class
from rl_loop.harmony.o200k import ensure_o200k
from rl_loop.sandbox import check_isolation
from rl_loop.tasks.task_file import TaskData
from rl_loop.tracking.run_directory import RunDirectory

CONNECT_SECONDS = 3.0
READ_NOW_BYTES = 20 << 20
"""Task files up to this size are read by the check, every row; larger ones would make it slow."""
GB = 1e9


def check_what_a_run_needs(config: RunConfig, has_own_ray: bool = False) -> None:
    """Raise CannotStart if ``gptoss sft`` or ``gptoss rl`` would fail for want of something; SandboxUnavailable,
    TaskFileError and VocabularyUnavailable say it of themselves. ``has_own_ray``: RAY_ADDRESS will be another."""
    if not has_own_ray:
        check_ray_address()
    ensure_o200k()
    if config.initial_weights is not None:
        check_weights("initial_weights", config.initial_weights, config.model)
    check_newest_checkpoint(RunDirectory(config.directory))
    check_data(config)
    if isinstance(config, RlConfig):
        check_rollouts(config)
    check_tracking()
    check_disk(config)


def check_what_an_evaluation_needs(config: RlConfig, weights: Path | None, output: Path) -> None:
    """The same of ``gptoss eval``, whose ``weights`` replace those of the configuration."""
    endpoint = config.evaluation.endpoint
    if endpoint is not None:
        check_endpoint(endpoint)
    elif weights is not None:
        check_weights("--weights", weights, config.model)
    elif config.initial_weights is not None:
        check_weights("initial_weights", config.initial_weights, config.model)
    else:
        raise CannotStart("nothing to evaluate: give --weights, initial_weights or evaluation.endpoint")
    if endpoint is None:
        check_ray_address()
    ensure_o200k()
    check_data(config)
    check_rollouts(config, uses_engine=endpoint is None)
    check_writable(output.parent)


# -- what is read ---------------------------------------------------------------------------------------------------


def check_weights(key: str, path: Path, model: ModelConfig) -> None:
    """``path``: a Hugging Face directory, a Megatron checkpoint or a run that has one. Its model must be ``model``."""
    if (path / "config.json").exists():
        _check_safetensors(key, path)
        _compare_models(key, path / "config.json", model, ModelConfig.from_hf_config)
        return

    pointer = path / "checkpoints" / "latest"
    checkpoint = path / "checkpoints" / pointer.read_text().strip() if pointer.exists() else path
    if not (checkpoint / "metadata.json").exists():
        missing = "" if path.exists() else ": it does not exist"
        raise CannotStart(
            f"{key}: {path} is neither a Hugging Face directory (config.json), nor a Megatron checkpoint "
            f"(metadata.json), nor the directory of a run that has saved a checkpoint{missing}"
        )
    if (described := checkpoint / "gptoss_config.json").exists():
        _compare_models(key, described, model, lambda file: ModelConfig.model_validate_json(file.read_bytes()))


def _check_safetensors(key: str, path: Path) -> None:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        if not any(path.glob("model*.safetensors")):
            raise CannotStart(f"{key}: {path} has a config.json, but neither model.safetensors nor {index.name}")
        return
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CannotStart(f"{key}: {index} cannot be read ({error!r})") from None
    if missing := [file for file in files if not (path / file).exists()]:
        raise CannotStart(f"{key}: {path} lacks {missing[0]} ({len(missing)} of {len(files)} files); download it again")


def _compare_models(key: str, file: Path, model: ModelConfig, read: Callable[[Path], ModelConfig]) -> None:
    try:
        if file.name == "config.json" and "model_type" not in json.loads(file.read_bytes()):
            return  # OpenAI's original format, whose keys are other ones; the trainer compares its shapes
        theirs = read(file).model_dump()
    except (OSError, ValueError) as error:
        raise CannotStart(f"{key}: {file} does not describe a GPT-OSS model: {_first_line(error)}") from None
    # neither says anything about what the weights compute
    ours = model.model_dump(exclude={"initializer_std", "max_length"})
    if different := [f"{name} is {theirs[name]} there and {value} here" for name, value in ours.items()
                     if theirs[name] != value]:  # fmt: skip
        raise CannotStart(f"{key}: {file.parent} is another model than the configuration's: {', '.join(different)}")


def check_newest_checkpoint(run: RunDirectory) -> None:
    for root in (run.checkpoints, run.critic_checkpoints):
        pointer = root / "latest"
        if pointer.exists() and not (root / pointer.read_text().strip() / "metadata.json").exists():
            raise CannotStart(f"{pointer} names {pointer.read_text().strip()}, which is missing or incomplete; "
                              "correct or delete the file")  # fmt: skip


def check_data(config: RunConfig) -> None:
    """Every file that ``tasks.sources`` names; of small ones every row. Data sets of the hub are not looked at."""
    for name, source in config.tasks.sources.items():
        key = f"tasks.sources.{name}"
        for field, path in (("train_path", source.train_path), ("held_out_path", source.held_out_path)):
            if path is not None and not path.startswith("hub:"):
                _check_file(f"{key}.{field}", Path(path))
                _read_rows(name, source, path)
        if source.pass_rate is not None:
            _check_file(f"{key}.pass_rate.episodes", source.pass_rate.episodes)


def _check_file(key: str, path: Path) -> None:
    if not path.is_file():
        raise CannotStart(f"{key}: {path} {'is no file' if path.exists() else 'does not exist'}")
    if not os.access(path, os.R_OK):
        raise CannotStart(f"{key}: {path} may not be read by this user")


def _read_rows(name: str, source: SourceConfig, path: str) -> None:
    """Raises TaskFileError, naming the line of the first bad row."""
    if path.endswith(".parquet") or Path(path).stat().st_size > READ_NOW_BYTES:
        return  # what reads Parquet takes seconds to import
    environment = environment_class(source.environment)
    TaskData(path, name, environment, environment.Options.model_validate(source.options))


# -- what is started ------------------------------------------------------------------------------------------------


def runs_here() -> bool:
    """Whether workers will run on this machine, and not on the nodes of a cluster."""
    return not is_placed() and not os.environ.get("RAY_ADDRESS")


def check_ray_address() -> None:
    """The Ray that RAY_ADDRESS names must answer: Ray itself waits for minutes."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return
    if address == "auto":
        if not Path("/tmp/ray/ray_current_cluster").exists():
            raise CannotStart("RAY_ADDRESS is auto, and no Ray was started on this machine: unset RAY_ADDRESS to "
                              "start one for the run")  # fmt: skip
        return
    advice = "start Ray there (ray start --head), correct RAY_ADDRESS, or unset it to start a Ray for this run"
    where = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        host, port = where.hostname, where.port
    except ValueError:
        host, port = None, None
    if host is None or port is None:
        raise CannotStart(f"RAY_ADDRESS is {address!r}, not HOST:PORT")
    try:
        answer = _http2_greeting(host, port)
    except OSError as error:
        raise CannotStart(f"RAY_ADDRESS is {address}, where nothing answers ({_reason(error)}): {advice}") from None
    if not answer:
        raise CannotStart(f"RAY_ADDRESS is {address}, where something else than Ray answers: {advice}")


def _http2_greeting(host: str, port: int) -> bool:
    """Whether what listens there speaks HTTP/2, as gRPC and so Ray do (RFC 9113, section 3.4): it answers our preface
    with a SETTINGS frame. Raises OSError if nothing listens."""
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
            return True
        empty_settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
        try:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + empty_settings)
            header = connection.recv(9)
        except OSError:
            return False
        return len(header) == 9 and header[3] == 4


def check_endpoint(url: str) -> None:
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or where.hostname is None:
        raise CannotStart(f"evaluation.endpoint: {url} is not an address such as http://host:8000/v1")
    port = where.port or (443 if where.scheme == "https" else 80)
    try:
        socket.create_connection((where.hostname, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise CannotStart(f"evaluation.endpoint: nothing answers at {url} ({_reason(error)})") from None


def check_rollouts(config: RlConfig, uses_engine: bool = True) -> None:
    """The sandbox and the engine's environment, if they are to run on this machine."""
    if not runs_here():
        return
    check_isolation(config.sandbox)  # raises SandboxUnavailable, which says what to install
    if uses_engine:
        config.rollout.engine.check_machine()


def check_tracking() -> None:
    if "WANDB_PROJECT" in os.environ and importlib.util.find_spec("wandb") is None:
        raise CannotStart("WANDB_PROJECT is set, but wandb is not installed: pip install wandb, or unset it")


# -- what is written ------------------------------------------------------------------------------------------------


def check_writable(directory: Path) -> None:
    """``directory``, or the nearest one above it that exists, must be one that this user can write in."""
    nearest = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise CannotStart(f"output_dir: {nearest} is a file; a run needs a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise CannotStart(f"output_dir: {nearest} may not be written by this user")


def check_disk(config: RunConfig) -> None:
    """There must be room for the checkpoints that the run will hold at a time."""
    check_writable(config.directory)
    checkpoint, wanted = checkpoint_bytes(config), checkpoints_at_a_time(config)
    there = len(list(RunDirectory(config.directory).checkpoints.glob("step_??????")))
    needed = checkpoint * max(0, wanted - there)
    folder = next(folder for folder in (config.directory.absolute(), *config.directory.absolute().parents)
                  if folder.exists())  # fmt: skip
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CannotStart(
            f"output_dir: {_size(free)} are free in {folder}, and the run needs {_size(needed)} for {wanted} "
            f"checkpoints of {_size(checkpoint)}: make room, or lower training.keep_checkpoints"
        )


def checkpoint_bytes(config: RunConfig) -> float:
    """Of one checkpoint: weights, and of every model that learns two fp32 moments and fp32 master weights."""
    weights = {"float32": 4, "bfloat16": 2}[config.dtype]
    master = 0 if config.dtype == "float32" else 4
    models = 2 if isinstance(config, RlConfig) and config.algorithm.critic else 1
    return models * config.model.num_parameters * (weights + master + 8)


def checkpoints_at_a_time(config: RunConfig) -> int:
    """An older one is deleted only when a newer one is complete."""
    training = config.training
    return min(training.keep_checkpoints + 1, math.ceil(training.steps / training.checkpoint_every))


def _size(count: float) -> str:
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / 1e6:.1f} MB"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or type(error).__name__).lower()


def _first_line(error: Any) -> str:
    return str(error).strip().splitlines()[0]
