"""Injects faults into a run over Ray and compares what becomes of it with an undisturbed one.

    python -m benchmarks.faults                       # one fault of every kind, about half an hour
    python -m benchmarks.faults --count 200 --seed 7
    python -m benchmarks.faults --kinds kill_worker lie_nan --count 4 --steps 8

A small policy learns on the CPU with all real parts: Ray, Megatron, the sandbox, the checker of
answers, checkpoints, recorded episodes. At random moments something happens to it:

    kill_*      SIGKILL of a trainer rank, a rollout worker, the server that checks answers, the
                server of a sandbox, the driver, Ray's node
    stop        SIGSTOP of one of these processes (of Ray's node no), and SIGCONT --stopped later
    starve      two busy loops for each core
    cut         every TCP connection on the loopback of a process of the run is closed (root)
    fill        the file system of the run, a small one, is full (root)
    corrupt_*   a byte of the newest checkpoint, of a recorded episode file, of the weights on their
                way to the engines
    lie_*       an engine's answer has NaN log-probs, a weight version to come, or is that of
                another request

Then, within --patience seconds, either the run goes on with a further step, or it ends and says why
in its last line, leaving no process. One that has ended is continued by ``--resume``. A fault fails
if neither happens in time, if a step's loss is another one than that of the undisturbed run, if a
step was trained on other episodes or on one twice, or if nothing names the damage. The engine is
deterministic, so losses must agree to the last bit; --tolerance allows them to differ.

What is random comes from --seed, but for the moments within a step: how fast a machine is decides
them. Ends with status 1 if a fault failed.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow.parquet as parquet

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.harmony.codec import ParsedMessage
from rl_loop.session import build_tasks
from rl_loop.tracking.episode_files import read_row_groups
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.run_directory import RunDirectory, RunDirectoryError, read_json_lines

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs/rl/tiny_retool.yaml"
MARK = "GPTOSS_FAULT_RUN"
"""In the environment of whatever an attempt starts: tells its processes from all others."""
TASKS = 2
SAMPLES = 4
CHECKPOINT_EVERY = 2
FILE_SYSTEM_BYTES = 96 << 20
MOST_RETRIES = 20
"""Times that a fault is put off because what it needs is not there yet."""
LEAVING_SECONDS = 60.0
"""In which the processes of a run that has ended must be gone."""

PROCESSES = {
    "trainer": "ray::TrainerProcess",
    "worker": "ray::RolloutWorker",
    "checker": "rl_loop.rewards.math_verify_server",
    "sandbox": "rl_loop.sandbox.inside.server",
    "node": "raylet/raylet",
}
"""What the command lines of a run's processes contain; the driver is known by its id."""
ENDS_THE_RUN = (
    "kill_trainer",
    "kill_driver",
    "kill_node",
    "corrupt_checkpoint",
    "corrupt_bucket",
    "lie_version",
)
"""Kinds after which a run that goes on would not have noticed."""


@dataclass(frozen=True)
class Options:
    """What the campaign does."""

    seed: int = 0
    count: int = 0
    """Faults; 0 for one of each kind."""
    kinds: tuple[str, ...] = ()
    steps: int = 12
    """Of one course; a further course begins when all its steps are done."""
    stopped_seconds: float = 20.0
    starved_seconds: float = 20.0
    patience: float = 60.0
    minutes: float = 60.0
    """After which no fault is injected any more."""
    tolerance: float = 0.0
    """By which a loss may differ from the undisturbed run's."""
    deterministic: bool = True


@dataclass
class Injection:
    """One fault and what became of it."""

    kind: str
    step: int
    """Steps that were done before it."""
    detail: str = ""
    outcome: str = ""
    """"healed" or "ended"."""
    said: str = ""
    """What the run said of it."""
    seconds: float = 0.0
    """Until it had healed or ended."""
    failure: str = ""
    """Why the fault counts as failed; empty if it does not."""


# -- a run ----------------------------------------------------------------------------------------


class Attempt:
    """A driver and all that it starts."""

    def __init__(self, config: Path, arguments: list[str], log: Path) -> None:
        self.mark = uuid.uuid4().hex
        environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "OMP_NUM_THREADS": "1",
        }
        self._log = log
        with log.open("wb") as output:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "launch", "rl", str(config), *arguments],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        return self.driver.poll() is not None

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def last_error(self) -> str:
        """Return the line with which a failed command names its cause; empty if there is none."""
        lines = [line for line in self.said.splitlines() if line.startswith("gptoss: ")]
        return lines[-1] if lines else ""

    def processes(self, name: str = "") -> list[psutil.Process]:
        """List living processes of the attempt whose command line contains ``name``."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) != self.mark:
                    continue
                line = " ".join(process.cmdline())
                if line and name in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def leftovers(self, seconds: float) -> list[str]:
        """Wait until no process is left, and return what is there after ``seconds`` all the same;
        that is killed."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.5)
        lines = []
        for process in left:
            with suppress(psutil.Error):
                lines.append(" ".join(process.cmdline())[:80])
                process.kill()
        return lines


class Course:
    """One run from its first step to its last, in as many attempts as it takes."""

    def __init__(self, options: Options, directory: Path, further: Sequence[str] = ()) -> None:
        """``further``: settings of the run besides."""
        self.directory = directory
        self.orders = directory / "orders"
        self.orders.mkdir(parents=True, exist_ok=True)
        self._options = options
        self._overrides = [*overrides(options, directory, self.orders), *further]
        self.config = load_config(CONFIG, RlConfig, self._overrides)
        self.run = RunDirectory(self.config.directory)
        self.attempts: list[Attempt] = []

    def start(self, resume: bool = False) -> Attempt:
        log = self.directory.with_name(f"{self.directory.name}_{len(self.attempts)}.log")
        arguments = [*self._overrides, *(["--resume"] if resume else [])]
        self.attempts.append(Attempt(CONFIG, arguments, log))
        return self.attempts[-1]

    def losses(self) -> dict[int, float]:
        """Return the loss of every recorded step."""
        with suppress(RunDirectoryError):
            records = read_json_lines(self.run.metrics)
            return {r["step"]: r["loss"] for r in records if r.get("loss") is not None}
        return {}

    def newest_time(self) -> float:
        """Return when the newest step was recorded, seconds since the epoch."""
        with suppress(RunDirectoryError):
            records = read_json_lines(self.run.metrics)
            return max((float(r["time"]) for r in records), default=0.0)
        return 0.0

    def episodes(self) -> dict[int, Counter[str]]:
        """Count the episodes that every step was trained on, by task. Raises RunDirectoryError."""
        reader = EpisodeReader(self.run.episodes)
        reader.refresh()
        trained: dict[int, Counter[str]] = {}
        for row in reader.figures.to_pylist():
            if row["split"] == "train" and row["invalid"] is None:
                trained.setdefault(row["step"], Counter())[row["task_id"]] += 1
        return trained

    def expected_episodes(self) -> dict[int, Counter[str]]:
        tasks = build_tasks(self.config)
        return {
            step: Counter({task.task_id: SAMPLES for task in tasks.train(step * TASKS, TASKS)})
            for step in range(self._options.steps)
        }


def overrides(options: Options, directory: Path, orders: Path) -> list[str]:
    """Return the settings of the run."""
    small = [
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.head_size=16",
        "initial_weights=null",
        "rollout.workers=2",
        f"rollout.tasks_per_step={TASKS}",
        f"rollout.samples_per_task={SAMPLES}",
        "rollout.max_new_tokens_per_turn=60",
        "reward.format_error=-2",
        "tasks.held_out_tasks=4",
        "evaluate_every=1000",
        f"training.steps={options.steps}",
        f"training.checkpoint_every={CHECKPOINT_EVERY}",
        "training.keep_checkpoints=2",
        f"output_dir={directory}",
    ]
    tasks = build_tasks(load_config(CONFIG, RlConfig, small))
    call = ParsedMessage("analysis", "python", "code", "print(sum(range(100)))")
    answer = ParsedMessage("final", None, None, "\\boxed{1/2 + 1/3}")
    scripts = {
        "call": tasks.harmony.render_assistant([call], "<|call|>"),
        "answer": tasks.harmony.render_assistant([answer], "<|return|>"),
    }
    engine = {
        "type": "benchmarks.fault_engine:FaultyBackend",
        "options": {**scripts, "orders": str(orders), "deterministic": options.deterministic},
    }
    return [*small, f"rollout.engine={json.dumps(engine)}"]


@contextmanager
def small_file_system(directory: Path) -> Iterator[None]:
    """Mount a file system of FILE_SYSTEM_BYTES at ``directory``, where this process may."""
    directory.mkdir(parents=True, exist_ok=True)
    if os.getuid() != 0:
        yield
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES}", "none", str(directory)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=False)


# -- faults ---------------------------------------------------------------------------------------


@dataclass
class Moment:
    """Where a fault meets a run."""

    course: Course
    attempt: Attempt
    random: random.Random
    options: Options
    undo: ExitStack = field(default_factory=ExitStack)
    """Undone once the fault has healed or the run has ended."""


def victim(moment: Moment, name: str) -> psutil.Process:
    """Choose one of the run's processes. Raises LookupError if there is none of that name."""
    if name == "driver":
        return psutil.Process(moment.attempt.driver.pid)
    found = sorted(moment.attempt.processes(PROCESSES[name]), key=lambda process: process.pid)
    if not found:
        raise LookupError(f"no {name} is running")
    return moment.random.choice(found)


def kill(name: str) -> Callable[[Moment], str]:
    def inject(moment: Moment) -> str:
        process = victim(moment, name)
        process.kill()
        return f"{name} {process.pid}"

    return inject


def stop(moment: Moment) -> str:
    name = moment.random.choice(["trainer", "worker", "checker", "sandbox", "driver"])
    process = victim(moment, name)
    process.suspend()
    time.sleep(moment.options.stopped_seconds)
    with suppress(psutil.NoSuchProcess):
        process.resume()
    return f"{name}, {moment.options.stopped_seconds:g} s"


def starve(moment: Moment) -> str:
    command = [sys.executable, "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    time.sleep(moment.options.starved_seconds)
    for loop in loops:
        loop.kill()
        loop.wait()
    return f"{len(loops)} loops, {moment.options.starved_seconds:g} s"


def cut(moment: Moment) -> str:
    process = victim(moment, moment.random.choice(["worker", "trainer", "driver"]))
    connections = [
        c for c in process.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED and c.raddr
    ]
    for connection in connections:
        subprocess.run(
            ["ss", "-K", "-tn", "sport", "=", str(connection.laddr.port)],
            capture_output=True,
            check=False,
        )
    if not connections:
        raise LookupError(f"{process.name()} has no connections")
    return f"{len(connections)} connections of {process.name()}"


def fill(moment: Moment) -> str:
    ballast = moment.course.directory / "ballast"
    moment.undo.callback(ballast.unlink, missing_ok=True)
    written = 0
    try:
        with ballast.open("wb", buffering=0) as file:
            while True:
                written += file.write(b"\0" * 4096)
    except OSError:
        pass
    return f"{written >> 20} MiB"


def flip_a_byte(path: Path, chance: random.Random, place: int | None = None) -> str:
    """Change one bit of a file, at a random place if none is given, and say where."""
    content = bytearray(path.read_bytes())
    if place is None:
        place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(content[place : place + 1])
    return f"byte {place} of {path.parent.name}/{path.name}"


def corrupt_checkpoint(moment: Moment) -> str:
    """Damage the newest checkpoint and end the run, which has to notice when it goes on."""
    root = moment.course.run.checkpoints
    path = root / (root / "latest").read_text().strip()
    moment.attempt.driver.kill()
    moment.attempt.driver.wait()
    names = sorted(file for file in path.iterdir() if file.name != "checksums.json")
    return flip_a_byte(moment.random.choice(names), moment.random)


def corrupt_episodes(moment: Moment) -> str:
    """Damage the content of a column of recorded episodes, see that reading names it, mend it.

    Parquet has checksums of its pages' contents, none of their headers and of the footer."""
    path = moment.random.choice(sorted(moment.course.run.episodes.glob("*-*.parquet")))
    pristine = path.read_bytes()
    row_group = parquet.read_metadata(path).row_group(0)
    column = row_group.column(moment.random.randrange(row_group.num_columns))
    start = column.dictionary_page_offset or column.data_page_offset
    place = flip_a_byte(path, moment.random, start + column.total_compressed_size - 1)
    try:
        for _ in read_row_groups(path):
            pass
    except RunDirectoryError as error:
        return f"{place}: {error}"
    finally:
        # A resume may have begun the file anew.
        if path.exists():
            path.write_bytes(pristine)
    raise AssertionError(f"{place}: it was read as if nothing had happened")


def order(name: str) -> Callable[[Moment], str]:
    def inject(moment: Moment) -> str:
        (moment.course.orders / name).touch()
        deadline = time.monotonic() + moment.options.patience
        while (moment.course.orders / name).exists():
            if moment.attempt.has_ended or time.monotonic() > deadline:
                raise LookupError("nobody has carried out the order")
            time.sleep(0.1)
        return name

    return inject


KINDS: dict[str, Callable[[Moment], str]] = {
    "kill_trainer": kill("trainer"),
    "kill_worker": kill("worker"),
    "kill_checker": kill("checker"),
    "kill_sandbox": kill("sandbox"),
    "kill_driver": kill("driver"),
    "kill_node": kill("node"),
    "stop": stop,
    "starve": starve,
    "cut": cut,
    "fill": fill,
    "corrupt_checkpoint": corrupt_checkpoint,
    "corrupt_episodes": corrupt_episodes,
    "corrupt_bucket": order("bucket"),
    "lie_nan": order("nan"),
    "lie_version": order("version"),
    "lie_twice": order("twice"),
}
NEEDS_ROOT = ("cut", "fill")


# -- the campaign ---------------------------------------------------------------------------------


class Campaign:
    """Injects faults, one after the other."""

    def __init__(self, options: Options, directory: Path) -> None:
        self.options = options
        self.injections: list[Injection] = []
        self.courses = 0
        self._directory = directory
        self._random = random.Random(options.seed)
        self._deadline = time.monotonic() + 60 * options.minutes
        self._left = self._plan()
        self.reference: dict[int, float] = {}

    def _plan(self) -> list[str]:
        """Choose the kinds: every one as often as any other, in a random order."""
        kinds = list(self.options.kinds or KINDS)
        if os.getuid() != 0:
            kinds = [kind for kind in kinds if kind not in NEEDS_ROOT]
        count = self.options.count or len(kinds)
        plan: list[str] = []
        while len(plan) < count:
            plan += self._random.sample(kinds, len(kinds))
        return plan[:count]

    def measure_reference(self) -> None:
        """Run undisturbed."""
        course = Course(self.options, self._directory / "undisturbed")
        attempt = course.start()
        if attempt.driver.wait() != 0:
            raise SystemExit(f"the undisturbed run failed:\n{attempt.said[-3000:]}")
        left = attempt.leftovers(LEAVING_SECONDS)
        assert not left, left
        self.reference = course.losses()
        assert course.episodes() == course.expected_episodes()

    def run_all(self) -> None:
        """Run courses until all faults have been injected."""
        while self._left and time.monotonic() < self._deadline:
            directory = self._directory / f"course_{self.courses}"
            self.courses += 1
            with small_file_system(directory):
                self._run_course(Course(self.options, directory))
            shutil.rmtree(directory, ignore_errors=True)

    def _run_course(self, course: Course) -> None:
        first = len(self.injections)
        attempt = course.start()
        while True:
            self._wait_for_step(course, attempt)
            is_late = not self._left or time.monotonic() > self._deadline
            if attempt.has_ended or is_late or len(course.losses()) >= self.options.steps - 1:
                break
            injection = self._inject(course, attempt)
            if attempt.has_ended:
                attempt = self._resume(course, attempt, injection)

        attempt.driver.wait()
        last = self.injections[-1] if len(self.injections) > first else Injection("none", 0)
        while attempt.driver.returncode != 0:
            last.failure = last.failure or f"the run failed later: {attempt.last_error()}"
            attempt = self._resume(course, attempt, last)
            if attempt.driver.wait() != 0 and len(course.attempts) > 3 * (len(self.injections) + 2):
                raise SystemExit(f"a run cannot be continued:\n{attempt.said[-3000:]}")
        self._check_course(course, attempt, last)

    def _wait_for_step(self, course: Course, attempt: Attempt) -> None:
        """Wait until this attempt has recorded a step, and then for some part of another."""
        began = attempt_start(attempt)
        while not attempt.has_ended and course.newest_time() < began:
            time.sleep(0.2)
        time.sleep(self._random.uniform(0, 3))

    def _inject(self, course: Course, attempt: Attempt) -> Injection:
        injection = Injection(self._left.pop(0), step=len(course.losses()))
        self.injections.append(injection)
        moment = Moment(course, attempt, self._random, self.options)
        with moment.undo:
            began = time.time()
            try:
                injection.detail = KINDS[injection.kind](moment)
            except (LookupError, psutil.NoSuchProcess, FileNotFoundError) as error:
                injection.outcome = "not injected"
                injection.said = str(error)
                if sum(i.outcome == "not injected" for i in self.injections) < MOST_RETRIES:
                    self._left.append(injection.kind)
                print_injection(injection)
                return injection
            except AssertionError as error:
                injection.failure = str(error)
            self._await_outcome(course, attempt, injection, began)
        self._compare_losses(course, injection)
        print_injection(injection)
        return injection

    def _await_outcome(
        self, course: Course, attempt: Attempt, injection: Injection, began: float
    ) -> None:
        """Wait until the run has recorded a step that began after the fault, or has ended."""
        acted = time.time()
        deadline = acted + self.options.patience
        steps_after = Counter[float]()
        while time.time() < deadline:
            newest = course.newest_time()
            if newest > acted:
                steps_after[newest] += 1
            if attempt.has_ended:
                injection.outcome = "ended"
                break
            # The step under way may have been past what the fault can do to it.
            if len(steps_after) >= 2:
                injection.outcome = "healed"
                break
            time.sleep(0.2)
        injection.seconds = time.time() - acted
        if not injection.outcome:
            injection.failure = f"neither healed nor ended within {self.options.patience:g} s"
            attempt.driver.kill()
            attempt.driver.wait()
            injection.outcome = "hung"
        self._judge(attempt, injection)

    def _judge(self, attempt: Attempt, injection: Injection) -> None:
        was_killed = injection.kind in ("kill_driver", "corrupt_checkpoint")
        if injection.outcome == "ended" and not was_killed:
            injection.said = attempt.last_error()
            if attempt.driver.returncode == 0:
                injection.outcome = "healed"
            elif not injection.said:
                injection.failure = "it ended without saying why"
        if injection.outcome == "healed" and injection.kind in ENDS_THE_RUN:
            injection.failure = injection.failure or "nothing has noticed it"

    def _resume(self, course: Course, attempt: Attempt, injection: Injection) -> Attempt:
        left = attempt.leftovers(LEAVING_SECONDS)
        if left:
            injection.failure = injection.failure or f"left behind: {left}"
        for stale in course.orders.iterdir():
            stale.unlink()
        following = course.start(resume=True)
        if injection.kind == "corrupt_checkpoint":
            self._see_that_damage_is_named(course, following, injection)
        return following

    def _see_that_damage_is_named(
        self, course: Course, attempt: Attempt, injection: Injection
    ) -> None:
        """Wait until the run goes on, and look for the damaged file in what it said."""
        self._wait_for_step(course, attempt)
        file = injection.detail.rpartition("/")[2]
        named = re.search(rf"{re.escape(file)}: damaged[^\n]*", attempt.said)
        if named is None:
            injection.failure = injection.failure or "--resume has not named the damage"
        else:
            injection.said = named.group()

    def _compare_losses(self, course: Course, injection: Injection) -> None:
        for step, loss in course.losses().items():
            if step < injection.step - CHECKPOINT_EVERY - 1:
                continue  # that was there before, and compared then
            difference = abs(loss - self.reference[step])
            if not difference <= self.options.tolerance:
                injection.failure = injection.failure or (
                    f"the loss of step {step} is {loss}, and {self.reference[step]} undisturbed"
                )

    def _check_course(self, course: Course, attempt: Attempt, last: Injection) -> None:
        left = attempt.leftovers(LEAVING_SECONDS)
        if left:
            last.failure = last.failure or f"left behind: {left}"
        self._compare_losses(course, last)
        if set(course.losses()) != set(self.reference):
            last.failure = last.failure or f"steps recorded: {sorted(course.losses())}"
        if course.episodes() != course.expected_episodes():
            last.failure = last.failure or "a step was trained on other episodes, or on one twice"


def attempt_start(attempt: Attempt) -> float:
    """Return when a driver was started, seconds since the epoch."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(attempt.driver.pid).create_time()
    return 0.0


def print_injection(injection: Injection) -> None:
    verdict = f"FAILED: {injection.failure}" if injection.failure else "ok"
    print(
        f"{injection.kind:<18} after {injection.step:>2} steps  {injection.outcome:<7}"
        f"{injection.seconds:6.1f} s  {verdict}  [{injection.detail}] {injection.said[:160]}",
        flush=True,
    )


def report(campaign: Campaign) -> str:
    """Write the outcome as a Markdown table."""
    options = campaign.options
    lines = [
        f"seed {options.seed}, {options.steps} steps a course, {campaign.courses} courses",
        "",
        "| kind | injected | healed | ended, named, resumed | longest, s | failed |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [i for i in campaign.injections if i.kind == kind]
        done = [i for i in of_kind if i.outcome != "not injected"]
        if not done:
            continue
        outcomes = Counter(i.outcome for i in done)
        longest = max(i.seconds for i in done)
        failed = sum(bool(i.failure) for i in done)
        lines.append(
            f"| {kind} | {len(done)} | {outcomes['healed']} | {outcomes['ended']} "
            f"| {longest:.1f} | {failed} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=Options.seed)
    add("--count", type=int, default=Options.count, help="faults; one of each kind by default")
    add("--kinds", nargs="+", choices=list(KINDS), default=[], help="all by default")
    add("--steps", type=int, default=Options.steps, help="of a course")
    add("--stopped", type=float, default=Options.stopped_seconds, help="seconds of SIGSTOP")
    add("--starved", type=float, default=Options.starved_seconds, help="seconds of busy loops")
    add("--patience", type=float, default=Options.patience, help="seconds until it has healed")
    add("--minutes", type=float, default=Options.minutes, help="no fault after them")
    add("--tolerance", type=float, default=Options.tolerance, help="of a loss")
    add("--batched", action="store_true", help="the engine as it is by default: not deterministic")
    add("--json", type=Path, help="write every fault to this file")
    arguments = parser.parse_args()

    options = Options(
        seed=arguments.seed,
        count=arguments.count,
        kinds=tuple(arguments.kinds),
        steps=arguments.steps,
        stopped_seconds=arguments.stopped,
        starved_seconds=arguments.starved,
        patience=arguments.patience,
        minutes=arguments.minutes,
        tolerance=arguments.tolerance,
        deterministic=not arguments.batched,
    )
    with tempfile.TemporaryDirectory(prefix="faults_") as directory:
        campaign = Campaign(options, Path(directory))
        campaign.measure_reference()
        campaign.run_all()
    print(report(campaign))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([vars(i) for i in campaign.injections], indent=1))
    if any(injection.failure for injection in campaign.injections):
        sys.exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
