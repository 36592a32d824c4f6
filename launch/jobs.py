"""What was launched, and what has become of it: list, status, logs, cancel. A file per run under
``~/.local/state/gptoss`` remembers where it runs; the rest is one call to a shell on the login node."""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from rl_loop.config.errors import ConfigError

ACTIVE = {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"}


class ClusterError(ConfigError):
    """The cluster did not answer as it should; the message says what was asked."""


@dataclass
class Launch:
    """A run that was started with ``gptoss launch``."""

    name: str
    kind: str
    login: str | None
    run_dir: str
    command: str
    steps: int
    job: str  # number of the Slurm job, or process id of a local run
    submitted: str

    @property
    def place(self) -> str:
        """The run directory, and the login node to reach it by."""
        return f"{self.login}:{self.run_dir}" if self.login else self.run_dir

    @property
    def job_names(self) -> str:
        """Of the Slurm job, and of its parts if it is heterogeneous."""
        return ",".join(f"gptoss.{self.name}{part}" for part in ("", "-0", "-1"))

    def save(self) -> None:
        registry().mkdir(parents=True, exist_ok=True)
        (registry() / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1))


def registry() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local" / "state")) / "gptoss"


def known_launches() -> list[Launch]:
    """Newest last."""
    files = sorted(registry().glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [Launch(**json.loads(path.read_text())) for path in files]


def find_launch(name: str) -> Launch:
    known = {launch.name: launch for launch in known_launches()}
    if name not in known:
        raise ConfigError(f"no run called {name!r} was launched from here; known: {', '.join(known) or 'none'}")
    return known[name]


def shell(login: str | None, script: str, timeout: float = 60) -> str:
    """Output of a bash script, here or on the login node. Raises ClusterError with what it complained about."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", login, "bash -s"] if login else ["bash", "-s"]
    try:
        run = subprocess.run(command, input=script, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{login or 'this machine'} did not answer within {timeout:g} s") from None
    if run.returncode:
        raise ClusterError(f"{login or 'this machine'}: {run.stderr.strip() or f'exit status {run.returncode}'}")
    return run.stdout


def script(name: str, *arguments: str, **variables: str) -> str:
    """``launch/NAME`` for ``shell``, with its variables and arguments."""
    assignments = [f"{key}={shlex.quote(value)}" for key, value in variables.items()]
    return "\n".join([*assignments, shlex.join(["set", "--", *arguments]), Path(__file__).with_name(name).read_text()])


@dataclass
class Status:
    """What is known of a run right now."""

    state: str  # RUNNING, PENDING, ... as Slurm calls it.
    detail: str  # time, limit, nodes or the reason for waiting
    step: int  # training steps done
    attempts: list[tuple[str, dict[str, Any], dict[str, Any]]]
    """(attempt, its outcome or {}, its head.json or {}), oldest first."""


def query(launch: Launch) -> Status:
    """Ask the cluster and read the run directory."""
    asked = script("status.sh", RUN_DIR=launch.run_dir, KIND=launch.kind, NAMES=launch.job_names)
    answers = dict(sections(shell(launch.login, asked)))
    queue, accounting, metrics = answers.pop("queue"), answers.pop("accounting"), answers.pop("metrics")
    step = int(json.loads(metrics[0])["step"]) + 1 if metrics else 0
    attempts = []
    for title, lines in answers.items():
        records = [json.loads(line) for line in lines]
        outcome: dict[str, Any] = next((record for record in records if "result" in record), {})
        head: dict[str, Any] = next((record for record in records if "host" in record), {})
        attempts.append((title.split()[1], outcome, head))
    if launch.kind == "local":
        running = psutil.pid_exists(int(launch.job))
        state, detail = ("RUNNING" if running else "ENDED"), f"process {launch.job}"
    elif queue:
        number, state, elapsed, limit, nodes, reason = queue[0].split("|")
        more = f", {len(queue) - 1} more in the queue" if len(queue) > 1 else ""
        detail = f"job {number}, {elapsed} of {limit}, {nodes} nodes {reason}{more}"
    elif accounting:
        number, state, elapsed, end = accounting[0].split("|")
        detail = f"job {number}, ran {elapsed}, ended {end}"
    else:
        state, detail = "UNKNOWN", f"Slurm knows no job called gptoss.{launch.name}"
    return Status(state, detail, min(step, launch.steps), attempts)


def describe(launch: Launch) -> str:
    """``gptoss launch status``."""
    status = query(launch)
    lines = [f"{launch.name}: {status.state} ({status.detail})"]
    lines.append(f"  step {status.step} of {launch.steps}, in {launch.place}")
    for number, outcome, head in status.attempts:
        if outcome:
            lines.append(f"  attempt {number}: {outcome['result']} at step {outcome['last_step']}; {outcome['why']}")
            if outcome["error"]:
                lines.append(f"    first error: {outcome['error']}")
        elif head and (number, outcome, head) == status.attempts[-1]:
            lines.append(f"  attempt {number}: running; Ray dashboard {head['dashboard']}")
        else:
            lines.append(f"  attempt {number}: no outcome")
    return "\n".join(lines)


def logs(launch: Launch, attempt: str | None, node: str | None, lines: int, follow: bool) -> Iterator[str]:
    """Lines of the driver's log, or of one node's, of the newest or a given attempt."""
    options = ["-n", str(lines), *(["-F"] if follow else [])]
    file = f"{node}.log" if node else "driver.log"
    asked = script("logs.sh", *options, RUN_DIR=launch.run_dir, ATTEMPT=attempt or "", FILE=file)
    if not follow:
        yield from shell(launch.login, asked).splitlines()
        return
    process = subprocess.Popen(["ssh", launch.login, asked] if launch.login else ["bash", "-c", asked],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        for line in process.stdout or ():
            yield line.rstrip("\n")
    finally:
        process.terminate()


def cancel(launch: Launch) -> None:
    """End a run, and those that are chained to it. It gets the time that Slurm leaves (KillWait) to save."""
    if launch.kind == "slurm":
        jobs = f"timeout 20 squeue -h --me -n {shlex.quote(launch.job_names)} -o %i"
        shell(launch.login, f"{jobs} | xargs -r timeout 20 scancel")
    elif psutil.pid_exists(int(launch.job)):
        os.kill(int(launch.job), signal.SIGTERM)


def sections(output: str) -> list[tuple[str, list[str]]]:
    """[(title, lines)] of a text with lines "@title"."""
    sections: list[tuple[str, list[str]]] = []
    for line in output.splitlines():
        if line.startswith("@"):
            sections.append((line[1:], []))
        elif line.strip() and sections:
            sections[-1][1].append(line)
    return sections
