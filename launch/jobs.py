"""Launched runs: list, status, logs, cancel.

A file per run under ``~/.local/state/gptoss`` stores where it runs. All other information comes
from a shell on the login node.
"""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from launch.attempts import AttemptResult
from rl_loop.config.errors import ConfigError

ACTIVE = {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "CANCELLING"}
"""States in which the name of a run is in use."""


class ClusterError(ConfigError):
    """A request to the cluster failed. The message names the request."""


@dataclass(kw_only=True)
class Launch:
    """A run started by ``gptoss launch``, as stored in the registry."""

    name: str
    kind: Literal["local", "slurm"]
    login: str | None
    """``user@host`` of the login node; None for this machine."""
    run_dir: str
    command: str
    """Training command: "rl" or "sft"."""
    steps: int
    """Training steps in the whole run."""
    job: str
    """Slurm job number, or process id of a local run."""
    submitted: str
    """Local time of the submission, YYYY-MM-DD HH:MM."""
    cancelled: bool = False
    """True after ``gptoss launch cancel``. The run saves a checkpoint before it ends."""

    @property
    def location(self) -> str:
        """Run directory, with the login node if there is one."""
        if self.login is None:
            return self.run_dir
        return f"{self.login}:{self.run_dir}"

    @property
    def job_names(self) -> str:
        """Names of the Slurm job and of its parts if it is heterogeneous, separated by commas."""
        return ",".join(f"gptoss.{self.name}{suffix}" for suffix in ("", "-0", "-1"))

    def save(self) -> None:
        """Write the launch to the registry."""
        registry().mkdir(parents=True, exist_ok=True)
        (registry() / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1))


def registry() -> Path:
    """Return the directory with one file per launched run."""
    # As in the XDG Base Directory Specification.
    return Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local" / "state")) / "gptoss"


def known_launches() -> list[Launch]:
    """Return all launched runs, newest last."""
    # Launching the same name again rewrites its file, so the run becomes the newest.
    files = sorted(registry().glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [Launch(**json.loads(path.read_text())) for path in files]


def find_launch(name: str) -> Launch:
    """Return the launched run of a name.

    Raises:
        ConfigError: if there is none.
    """
    launches = {launch.name: launch for launch in known_launches()}
    if name not in launches:
        known = ", ".join(launches) or "none"
        raise ConfigError(
            f"no run named {name!r} was launched from this machine (known: {known}). "
            "`gptoss launch CONFIG name=NAME` starts one"
        )
    return launches[name]


def run_shell(login: str | None, script: str, timeout: float = 60) -> str:
    """Run a bash script and return its output.

    Args:
        login: login node; None for this machine.
        script: text of the script.
        timeout: seconds until the call fails.

    Raises:
        ClusterError: with the error output of the script, or after ``timeout``.
    """
    # Standard input needs no quoting and has no length limit.
    command = ["bash", "-s"]
    if login is not None:
        # Without batch mode, ssh would wait for a password.
        command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", login, "bash -s"]
    where = login or "this machine"

    try:
        result = subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{where} did not respond within {timeout:g} s") from None
    if result.returncode:
        reason = result.stderr.strip() or f"exit status {result.returncode}"
        raise ClusterError(f"{where}: {reason}")
    return result.stdout


def format_script(
    name: str,
    *,
    variables: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> str:
    """Return the script ``launch/NAME`` for ``run_shell``.

    Args:
        name: file name.
        variables: shell variables to set at the beginning.
        arguments: positional parameters of the script.
    """
    # Quoted, because names and paths may contain spaces.
    assignments = [f"{key}={shlex.quote(value)}" for key, value in variables.items()]
    body = Path(__file__).with_name(name).read_text()
    # `set --` gives the script its $1, $2, ... also over standard input.
    return "\n".join([*assignments, shlex.join(["set", "--", *arguments]), body])


@dataclass
class AttemptStatus:
    """One attempt, as recorded in the run directory."""

    name: str
    outcome: dict[str, Any] = field(default_factory=dict)
    """Content of outcome.json; empty until the attempt has ended."""
    head: dict[str, Any] = field(default_factory=dict)
    """Content of head.json; empty until the head node has started."""

    @property
    def is_finished(self) -> bool:
        """True if this attempt completed the run."""
        return self.outcome.get("result") == AttemptResult.FINISHED


@dataclass
class LaunchStatus:
    """Current status of a run."""

    state: str
    """Slurm's state; RUNNING, COMPLETING or ENDED for a local run, UNKNOWN if Slurm has no such job."""
    detail: str
    """Elapsed time, time limit and nodes, or the reason for waiting."""
    step: int
    """Number of completed training steps."""
    attempts: list[AttemptStatus]
    """Attempts, oldest first."""


def query_status(launch: Launch) -> LaunchStatus:
    """Return the status of a run from the cluster and from its directory."""
    script = format_script(
        "status.sh",
        variables={"RUN_DIR": launch.run_dir, "KIND": launch.kind, "NAMES": launch.job_names},
    )
    sections = dict(split_sections(run_shell(launch.login, script)))
    queue = sections.pop("queue")
    accounting = sections.pop("accounting")
    metrics = sections.pop("metrics")

    if launch.kind == "local":
        state, detail = _local_state(launch)
    else:
        state, detail = _slurm_state(launch, queue, accounting)
    # The remaining sections are "attempt NAME".
    attempts = [_parse_attempt(title, lines) for title, lines in sections.items()]
    if state == "RUNNING" and launch.cancelled:
        state = "CANCELLING"  # the run saves a checkpoint
    elif state == "RUNNING" and attempts and attempts[-1].is_finished:
        state = "COMPLETING"  # the run is complete, its processes stop

    # The file is missing until the first step is complete.
    step = int(json.loads(metrics[0])["step"]) if metrics else 0
    return LaunchStatus(state=state, detail=detail, step=step, attempts=attempts)


def _local_state(launch: Launch) -> tuple[str, str]:
    """Return (state, detail) of a local run."""
    state = "RUNNING" if _local_process_exists(launch) else "ENDED"
    return state, f"process {launch.job}"


def _local_process_exists(launch: Launch) -> bool:
    """Return True if the process of a local run exists."""
    # After the run has ended, another program may get its number. The node program works in the
    # snapshot below the run directory.
    try:
        directory = Path(psutil.Process(int(launch.job)).cwd())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return directory.is_relative_to(Path(launch.run_dir).resolve())


def _slurm_state(launch: Launch, queue: list[str], accounting: list[str]) -> tuple[str, str]:
    """Return (state, detail) of a Slurm run from squeue and sacct. status.sh has their formats."""
    # The queue comes first, because accounting may have only earlier attempts of the job.
    if queue:
        # squeue sorts by state, which lists the waiting jobs of a chain before the running one.
        jobs = [line.split("|") for line in queue]
        started = [job for job in jobs if job[1] != "PENDING"]
        number, state, elapsed, limit, nodes, reason = (started or jobs)[0]
        detail = f"job {number}, {elapsed} of {limit}, {nodes} nodes {reason}"
        if len(queue) > 1:  # a chain, or the parts of a heterogeneous job
            detail += f", {len(queue) - 1} more in the queue"
        return state, detail

    if accounting:
        number, state, elapsed, end = accounting[0].split("|")
        return state, f"job {number}, ran {elapsed}, ended {end}"

    return "UNKNOWN", f"Slurm has no job named gptoss.{launch.name}"


def _parse_attempt(title: str, lines: list[str]) -> AttemptStatus:
    """Parse the section of an attempt: one line each for outcome.json and head.json, if present."""
    attempt = AttemptStatus(title.split()[1])
    # Both files are JSON objects in one line, with different keys.
    for line in lines:
        record = json.loads(line)
        if "result" in record:
            attempt.outcome = record
        elif "host" in record:
            attempt.head = record
    return attempt


def describe_launches() -> list[str]:
    """Return the lines of ``gptoss launch list``: one per run, newest last."""
    launches = known_launches()
    # A login node may take seconds to respond, or not respond.
    with ThreadPoolExecutor() as threads:
        states = list(threads.map(_state_and_step, launches))

    return [
        f"{launch.name:24} {state:24} {launch.submitted}  {launch.kind:5}  {launch.location}"
        for launch, state in zip(launches, states, strict=True)
    ]


def _state_and_step(launch: Launch) -> str:
    try:
        # One cluster that does not respond must not hide the other runs.
        status = query_status(launch)
    except ClusterError:
        return f"{launch.login or 'this machine'} does not respond"
    return f"{status.state} step {status.step}/{launch.steps}"


def describe_status(launch: Launch) -> str:
    """Return the output of ``gptoss launch status``."""
    status = query_status(launch)
    lines = [
        f"{launch.name}: {status.state} ({status.detail})",
        f"  step {status.step} of {launch.steps}, in {launch.location}",
    ]
    for attempt in status.attempts:
        outcome = attempt.outcome

        # Only the newest attempt can be running. Earlier ones without outcome were killed.
        is_newest = attempt is status.attempts[-1]
        if outcome:
            result = f"{outcome['result']} at step {outcome['last_step']}; {outcome['why']}"
            lines.append(f"  attempt {attempt.name}: {result}")
            if outcome["error"]:
                lines.append(f"    first error: {outcome['error']}")
        elif attempt.head and is_newest:
            lines.append(
                f"  attempt {attempt.name}: running; Ray dashboard {attempt.head['dashboard']}",
            )
        else:
            lines.append(f"  attempt {attempt.name}: no outcome")
    return "\n".join(lines)


def read_log(
    launch: Launch,
    *,
    attempt: str | None,
    node: str | None,
    lines: int,
    follow: bool,
) -> Iterator[str]:
    """Yield the last lines of a log.

    Args:
        launch: run.
        attempt: name of the attempt; None for the newest.
        node: node whose log is read; None for the driver's log.
        lines: number of lines.
        follow: whether to continue with new lines until the caller stops.
    """
    options = ["-n", str(lines)]
    if follow:
        options.append("-F")
    script = format_script(
        "logs.sh",
        arguments=options,
        variables={
            "RUN_DIR": launch.run_dir,
            "ATTEMPT": attempt or "",
            "FILE": f"{node}.log" if node else "driver.log",
        },
    )
    if not follow:
        yield from run_shell(launch.login, script).splitlines()
        return

    command = ["bash", "-c", script] if launch.login is None else ["ssh", launch.login, script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout or ():
            yield line.rstrip("\n")
    finally:
        # Also when the caller closes the generator, for example on Ctrl-C.
        process.terminate()


def cancel(launch: Launch) -> str:
    """Cancel a run and its chained jobs, and return a message for the user.

    The run saves a checkpoint first. Slurm's KillWait limits the time for it.
    """
    if launch.kind == "slurm":
        # Select jobs by their name, because a chain has several job numbers.
        jobs = f"timeout 20 squeue -h --me -n {shlex.quote(launch.job_names)} -o %i"
        run_shell(launch.login, f"{jobs} | xargs -r timeout 20 scancel")
    elif _local_process_exists(launch):
        # Same signal as from Slurm: the node program lets the driver save, and exits after it.
        os.kill(int(launch.job), signal.SIGTERM)
    else:
        return f"{launch.name} has already ended. Its checkpoints are kept"

    _note_cancelled(launch)
    return (
        f"{launch.name}: cancelled. It saves a checkpoint and ends; "
        f"`gptoss launch status {launch.name}` shows its state"
    )


def _note_cancelled(launch: Launch) -> None:
    """Mark a run as cancelled in the registry, without a change of its place in the list."""
    file = registry() / f"{launch.name}.json"
    # known_launches sorts by this time.
    written = file.stat()
    launch.cancelled = True
    launch.save()
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))


def split_sections(output: str) -> list[tuple[str, list[str]]]:
    """Split a text at lines "@title" into (title, non-empty lines)."""
    sections: list[tuple[str, list[str]]] = []
    for line in output.splitlines():
        if line.startswith("@"):
            sections.append((line[1:], []))
        # Lines before the first title are no results, such as output of ~/.bashrc.
        elif line.strip() and sections:
            _, lines = sections[-1]
            lines.append(line)
    return sections
