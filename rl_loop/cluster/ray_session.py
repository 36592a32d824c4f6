"""Start and stop of Ray: a local instance, or the cluster at RAY_ADDRESS.

A local Ray is closed to other users and to the network. It listens on loopback only, requires a
random token (``rl_loop.cluster.tokens``), and keeps its sockets in a directory that only its user
may enter. It has no dashboard agent, which would run programs for its callers.

Ray 2.55 has hard-coded start-up time limits that a busy machine exceeds:

- The control store has 30 s to publish its port ("Timed out waiting for file").
- The raylet exits if the dashboard agent, a Python program that imports for seconds, has not
  published its ports after 15 s (``NodeManager::WaitForDashboardAgentPorts``).
- The driver gives up if the raylet has not registered after 30 s ("The current node timed out during
  startup").

Therefore this module publishes the agent's ports before the raylet starts, and the driver waits as
long as the control store and the raylet live.
"""

import atexit
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megatron_gptoss.user_error import UserError
from rl_loop.cluster.placement import free_port, has_placement
from rl_loop.cluster.ray_exit import end_with_message_on_exit, local_processes
from rl_loop.cluster.tokens import private_directory, require_ray_token, write_token

START_SECONDS = 300.0
"""Time limit for the start of Ray. An idle machine needs 5 s."""

DEFAULT_STORE_BYTES = 512 << 20
"""Default size of a local Ray's object store.

Training runs compute the size that they need (``rl_loop.lifecycle.store_size``).
"""

RAY_SETTINGS = {
    # Ray restarts worker processes that have not registered by then. On a busy machine the
    # replacement is as slow.
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    # With Ray's default, 15, all other programs would have priority over trainer and engines.
    "RAY_worker_niceness": "0",
    # Actors without a GPU keep CUDA_VISIBLE_DEVICES unchanged, as in later versions of Ray.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The control store records every call of an actor: 3.6 kB each, 100,000 calls by default. It
    # grew to 350 MB in a run of 10,000 small steps. `ray list tasks` shows the remaining records.
    "RAY_task_events_max_num_task_in_gcs": "1000",
    # NCCL's monitor would report the state of groups to every local process at port 28028, and
    # accept messages from the network that contain a fixed constant.
    "NCCL_RAS_ENABLE": "0",
}
"""Environment of every Ray, local or on the nodes of a job. Variables of the user have priority."""

OPENMP_SPIN_COUNT = "1000"
"""Rounds for which an OpenMP thread waits busily before it sleeps.

libgomp's default lasts milliseconds. A trainer with one thread per core becomes 9x slower if another
program occupies one core, because waiting threads spin on the core that the last thread needs. 1,000
rounds cost nothing on an idle machine.
"""

# (field of Ray's RayParams, name under which the agent publishes that port for the raylet)
AGENT_PORTS = (
    ("metrics_agent_port", "METRICS_AGENT_PORT_NAME"),
    ("metrics_export_port", "METRICS_EXPORT_PORT_NAME"),
    ("dashboard_agent_listen_port", "DASHBOARD_AGENT_LISTEN_PORT_NAME"),
    ("runtime_env_agent_port", "RUNTIME_ENV_AGENT_PORT_NAME"),
)

NO_PORT = -1
"""Port of an agent that does not listen.

With any other number Ray's processes would send the run's token to the program that listens there.
"""

UNUSED_PARTS = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's Node that start programs without use for a run on one machine.

- The autoscaler's monitor has no nodes to request.
- The log monitor sends lines that ``log_to_driver=False`` drops.
- The dashboard's server, which Ray starts even with ``include_dashboard=False``, would only report
  usage statistics to Ray's developers.

Together they take 2 s of processor time per start, about a third of Ray's total.
"""


LOOPBACK = "127.0.0.1"

MAX_SOCKET_PATH = 107
SOCKET_PATH_CHARACTERS = len("/ray/session_2026-11-27_20-21-36_680220_4194304/sockets/plasma_store")

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with the network interface of process groups.

By default gloo and NCCL choose an interface that other machines reach.
"""

WITHOUT_METRICS = {"RAY_enable_metrics_collection": "0"}
"""Environment of a Ray without a dashboard.

Its nodes serve no metrics, and have IDLE_AGENT instead of a dashboard agent, which would run programs
for its callers.
"""

# -S and -E skip site packages and Python's variables, for a fast start.
IDLE_AGENT = (sys.executable, "-S", "-E", str(Path(__file__).with_name("idle_agent.py")))
"""Command that replaces Ray's dashboard agent. Options of the agent follow."""
LAZY_AGENT = (sys.executable, "-S", "-E", str(Path(__file__).with_name("lazy_agent.py")))
"""Command that starts the agent of runtime environments. The agent's command follows."""


class RayStartError(UserError):
    """Ray did not start on this machine. The message names its logs."""

    # Ray takes a RuntimeError for "not there yet" and asks again.


@contextmanager
def ray_session(object_store_bytes: int = DEFAULT_STORE_BYTES) -> Iterator[None]:
    """Use the Ray of this process, else the cluster at RAY_ADDRESS, else start a local one.

    On exit, disconnect unless this process was connected before.

    Args:
        object_store_bytes: size of a local Ray's object store.
    """
    # Imported here, because reading a configuration does not need Ray.
    import ray

    if ray.is_initialized():
        yield
        return

    if "RAY_ADDRESS" in os.environ:
        os.environ.update(ray_environment())
        # Among clusters, only those that ``gptoss launch`` starts on one machine listen on loopback.
        is_local = has_placement() and os.environ["RAY_ADDRESS"].startswith(f"{LOOPBACK}:")
        with _on_loopback() if is_local else nullcontext():
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        processes = None
    else:
        start_local_ray(object_store_bytes=object_store_bytes)
        processes = local_processes()
    try:
        with end_with_message_on_exit(processes):
            yield
    finally:
        ray.shutdown()


def ray_environment() -> dict[str, str]:
    """Return RAY_SETTINGS, with the values of the user where they are set."""
    return {name: os.environ.get(name, value) for name, value in RAY_SETTINGS.items()}


def local_environment() -> dict[str, str]:
    """Return the environment of a local Ray, for a machine that runs other programs, too."""
    environment = ray_environment() | WITHOUT_METRICS
    environment |= loopback_environment()
    # GOMP_SPINCOUNT would override the user's policy.
    if "OMP_WAIT_POLICY" not in os.environ:
        environment["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
    return environment


def loopback_environment() -> dict[str, str]:
    """Return variables that keep process groups on loopback. The user's values have priority."""
    return {name: os.environ.get(name, "lo") for name in INTERFACE_VARIABLES}


def start_local_ray(
    num_cpus: int | None = None,
    object_store_bytes: int = DEFAULT_STORE_BYTES,
    seconds: float = START_SECONDS,
) -> None:
    """Start a Ray on this machine and connect to it.

    Args:
        num_cpus: processors that Ray offers; all by default.
        object_store_bytes: size of the object store.
        seconds: time limit.

    Raises:
        RayStartError: if Ray is not up after ``seconds``.
        NotPrivateError: if another user owns the directory for Ray's files.
    """
    import ray

    directory = local_directory()
    os.environ.update(local_environment())
    require_ray_token(_new_token(directory))
    with (
        with_start_timeout(seconds),
        _without_unused_parts(),
        _without_dashboard_services(),
        _on_loopback(),
    ):
        ray.init(
            address="local",
            num_cpus=num_cpus or os.cpu_count(),
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=LOOPBACK,
            # Ray makes its directory accessible to everybody; this one is below a private one.
            _temp_dir=str(directory / "ray"),
        )


def local_directory() -> Path:
    """Return the directory of this user's local Rays: sockets, logs, spilled objects, tokens."""
    root = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").absolute()
    name = f"gptoss-{os.getuid()}"
    # Ray creates Unix sockets in the directory, and Linux limits the length of their paths.
    if len(str(root / name)) + SOCKET_PATH_CHARACTERS > MAX_SOCKET_PATH:
        root = Path("/tmp")
    return private_directory(root / name)


def _new_token(directory: Path) -> Path:
    """Write a token for one Ray. The file is deleted when this process exits."""
    path = directory / f"token-{secrets.token_hex(8)}"
    write_token(path)
    atexit.register(path.unlink, missing_ok=True)
    return path


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a Ray that starts within the block keep its loopback address."""
    from ray._private import services

    # Ray would replace it with an address that other machines reach.
    resolve = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = resolve


@contextmanager
def _without_dashboard_services() -> Iterator[None]:
    """Start no services for a dashboard, in a Ray that starts within the block.

    IDLE_AGENT replaces the dashboard's agent, and LAZY_AGENT starts the agent of runtime
    environments when it is needed. The dashboard's server, if it starts, leaves out its
    services, as without the dashboard's requirements.
    """
    from ray._private import ray_constants, services, utils

    internals: Any = services
    command_of = internals._build_python_executable_command_memory_profileable
    get_error = utils.get_dashboard_dependency_error

    def command_without_agent(part: str, *arguments: Any, **options: Any) -> list[str]:
        if part == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [*IDLE_AGENT]
        command: list[str] = command_of(part, *arguments, **options)
        if part == ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT:
            return [*LAZY_AGENT, *command]
        return command

    internals._build_python_executable_command_memory_profileable = command_without_agent
    utils.get_dashboard_dependency_error = lambda: ImportError("the dashboard is switched off")
    try:
        yield
    finally:
        internals._build_python_executable_command_memory_profileable = command_of
        utils.get_dashboard_dependency_error = get_error


@contextmanager
def _without_unused_parts() -> Iterator[None]:
    """Leave UNUSED_PARTS out of a Ray that starts within the block."""
    import ray

    node_class: Any = ray._private.node.Node
    replaced = {name: getattr(node_class, name) for name in UNUSED_PARTS}
    for name in UNUSED_PARTS:
        setattr(node_class, name, lambda node, **options: None)
    try:
        yield
    finally:
        for name, start in replaced.items():
            setattr(node_class, name, start)


@contextmanager
def with_start_timeout(seconds: float = START_SECONDS) -> Iterator[None]:
    """Give a Ray node that starts within the block ``seconds`` to start.

    Raises:
        RayStartError: if the start takes longer, or if the raylet or the control store exits. All
            processes of the node are killed first.
    """
    import ray
    from ray._private import services

    # Ray's type hints lack these internals.
    internals: Any = ray
    raylet, node_module = internals._raylet, internals._private.node
    node_class = node_module.Node
    start_gcs_server, start_raylet = node_class.start_gcs_server, node_class.start_raylet
    wait_for_port, get_node = node_module.wait_for_persisted_port, services.get_node
    deadline = time.monotonic() + seconds
    nodes: list[Any] = []

    def start_known_gcs_server(node: Any) -> None:
        nodes.append(node)
        start_gcs_server(node)

    def start_raylet_without_waiting_for_agents(node: Any, *arguments: Any, **options: Any) -> None:
        _choose_agent_ports(node, raylet)
        start_raylet(node, *arguments, **options)
        # A node without the control store was not added before.
        if node not in nodes:
            nodes.append(node)

    def check_start() -> None:
        _check_start(nodes, deadline, seconds)

    def wait_for_port_until_deadline(
        directory: str, node_id: str, name: str, timeout_ms: int = 1000
    ) -> Any:
        # The call fails while there is no such file yet, after a wait of ``timeout_ms``.
        find = partial(wait_for_port, directory, node_id, name, timeout_ms=timeout_ms)
        return _repeat_until_found(find, check_start, delay=0.0)

    def get_node_until_deadline(gcs_address: str, node_id: str) -> Any:
        # The call fails if the raylet does not register in RAY_raylet_start_wait_time_s (30 s).
        find = partial(get_node, gcs_address, node_id)
        return _repeat_until_found(find, check_start, delay=0.1)

    node_class.start_gcs_server = start_known_gcs_server
    node_class.start_raylet = start_raylet_without_waiting_for_agents
    node_module.wait_for_persisted_port = wait_for_port_until_deadline
    services.get_node = get_node_until_deadline
    try:
        yield
    except RayStartError:
        _kill_processes(nodes)
        raise
    finally:
        node_class.start_gcs_server, node_class.start_raylet = start_gcs_server, start_raylet
        node_module.wait_for_persisted_port = wait_for_port
        services.get_node = get_node


def _repeat_until_found(
    find: Callable[[], Any], check_start: Callable[[], None], delay: float
) -> Any:
    """Return the result of ``find``. Repeat the call while it raises RuntimeError.

    Args:
        find: call to repeat.
        check_start: raises an error if the node cannot start any more.
        delay: seconds between two calls.
    """
    while True:
        try:
            return find()
        except RuntimeError:
            check_start()
        time.sleep(delay)


def _kill_processes(nodes: list[Any]) -> None:
    """Kill all processes of Ray nodes."""
    for node in nodes:
        # With ``check_alive`` Ray raises an error for a part that has exited already.
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def _choose_agent_ports(node: Any, raylet: Any) -> None:
    """Choose the ports of a node's agents, and write them where the raylet looks for them."""
    for field, name in AGENT_PORTS:
        port = NO_PORT
        if field == "runtime_env_agent_port" or not _is_without_metrics():
            port = getattr(node._ray_params, field) or free_port()
            setattr(node._ray_params, field, port)
        raylet.persist_port(node.get_session_dir_path(), node.node_id, getattr(raylet, name), port)


def _is_without_metrics() -> bool:
    return WITHOUT_METRICS.items() <= os.environ.items()


def _check_start(nodes: list[Any], deadline: float, seconds: float) -> None:
    """Raise RayStartError if a part of a starting node has exited, or after the deadline."""
    for node in nodes:
        for part, name in (("gcs_server", "control store"), ("raylet", "raylet")):
            processes = node.all_processes.get(part, [])
            if any(info.process.poll() is not None for info in processes):
                raise RayStartError(f"Ray's {name} exited during its start; {_logs(nodes)}")

    if time.monotonic() > deadline:
        raise RayStartError(
            f"Ray did not start within {seconds:g} s (load {os.getloadavg()[0]:.0f} on "
            f"{os.cpu_count()} processors). Stop other work on this machine, or see "
            f"{_logs(nodes)}"
        )


def _logs(nodes: list[Any]) -> str:
    return "its logs: " + ", ".join(node.get_logs_dir_path() for node in nodes)


def main() -> None:
    """Run Ray's command line with the start-up time limit of this module.

    Ray's client server, which runs programs for its callers, does not start. Without a dashboard
    there are no dashboard agents.
    """
    from ray.scripts import scripts

    internals: Any = scripts
    internals.get_ray_client_dependency_error = lambda: ImportError("the client is switched off")
    is_local = f"--node-ip-address={LOOPBACK}" in sys.argv
    with ExitStack() as stack:
        stack.enter_context(with_start_timeout())
        if _is_without_metrics():
            stack.enter_context(_without_dashboard_services())
        if is_local:
            stack.enter_context(_on_loopback())
            if _is_without_metrics():
                stack.enter_context(_without_unused_parts())
        internals.main()


if __name__ == "__main__":
    main()
