"""Injects faults into a run over Ray and compares what becomes of it with an undisturbed one.

    python -m tests.faults                       # one fault of every kind
    python -m tests.faults --count 200 --seed 7 --minutes 120 --results faults.jsonl
    python -m tests.faults --kinds kill_worker lie_nan --count 4
    python -m tests.faults --servers 2           # rollouts by servers of SGLang's protocol
    python -m tests.faults --pairs --count 50    # two faults at a time
    python -m tests.faults --whole-run 20        # kill -9 of everything, 20 times
    python -m tests.faults --table faults.jsonl  # of one or several files of results

A small policy learns on the CPU with all real parts: Ray, Megatron, the sandbox, the checker of
answers, checkpoints, recorded episodes. At random moments something happens to it:

    kill_*      SIGKILL of a trainer rank, a rollout worker, the server that checks answers, the
                server of a sandbox, the driver, Ray's node, Ray's control store, all of the run
    stop        SIGSTOP of one of these processes (of Ray's no), and SIGCONT --stopped later
    starve      two busy loops for each core
    cut         every TCP connection on the loopback of a process of the run is closed (root)
    fill        the file system of the run, a small one, is full (root)
    corrupt_*   a bit of the newest checkpoint, of a recorded episode file, of the weights on their
                way to the engines
    lie_*       an engine's answer has NaN log-probs, a weight version to come, or is that of
                another request

With --servers, servers sample: processes that speak SGLang's protocol and take the policy's weights
from the trainer by gloo, with the embedded engine inside (server.py). All of the above is done to
such a run, too, and besides:

    kill_server*   SIGKILL of a server, or its end at some call of a weight sync
    stop_server    SIGSTOP, and SIGCONT --stopped later
    cut_server     a server closes its connections in the middle of an answer
    keep_bucket    a server says it has taken a tensor, and keeps the old bytes
    lie_old        an answer is of the weights before
    lie_routes     all routed experts of an answer are 0

With --pairs every fault is two, the second within three seconds of the first. What either may do to
a run, the two may; they must heal if each must. A lie may be lost with the process that has told it.

Then, within --patience seconds, either the run goes on with a further step, or it ends and says why
in its last line, leaving no process. The patience is multiplied by the load average per core where
that is above 1. A run that has ended is continued by ``--resume``. A fault fails if neither happens
in time, if a step's loss is another one than that of the undisturbed run, or if nothing names the
damage. A course, a run with --faults-per-course of them, fails if a step is missing or was recorded
twice, or was trained on other episodes than its own, on one twice, or on one of other weights. The
engine is deterministic, so losses must agree to the last bit; --tolerance allows them to differ.

What is random comes from --seed, but for the moments within a step: how fast a machine is decides
them. With --results every fault is written to that file as it goes, and the same command goes on
with those of its seed that are not in it. Ends with status 1 if anything failed. Ctrl-C and SIGTERM
end a campaign with all that it has started; faults of the course under way do not count.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults import results
from tests.faults.campaign import Campaign
from tests.faults.kinds import KINDS, SERVER_KINDS
from tests.faults.options import Options
from tests.faults.whole_run import kill_whole_runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=Options.seed)
    add("--count", type=int, default=Options.count, help="faults; one of each kind by default")
    add("--kinds", nargs="+", choices=list(KINDS | SERVER_KINDS), default=[], help="all by default")
    add("--servers", type=int, default=Options.servers, help="that sample, of SGLang's protocol")
    add("--pairs", action="store_true", help="two faults at a time")
    add("--steps", type=int, default=Options.steps, help="of a course in which faults happen")
    add("--faults-per-course", type=int, default=Options.faults_per_course)
    add("--stopped", type=float, default=Options.stopped_seconds, help="seconds of SIGSTOP")
    add("--starved", type=float, default=Options.starved_seconds, help="seconds of busy loops")
    add("--patience", type=float, default=Options.patience, help="seconds until it has healed")
    add(
        "--minutes",
        type=float,
        default=Options.minutes,
        help="no fault after them, from the first step on",
    )
    add("--tolerance", type=float, default=Options.tolerance, help="of a loss")
    add("--batched", action="store_true", help="the engine as it is by default: not deterministic")
    add("--whole-run", type=int, metavar="N", help="kill everything N times, and nothing else")
    add("--results", type=Path, help="add every fault to this file, and go on with it")
    add("--table", type=Path, nargs="+", metavar="FILE", help="print the table of these files")
    arguments = parser.parse_args()

    if arguments.table:
        print(results.table(results.read(arguments.table)))
        return

    of_servers = sorted(set(arguments.kinds) & set(SERVER_KINDS))
    if of_servers and not arguments.servers:
        parser.error(f"--kinds {' '.join(of_servers)}: these need --servers")

    options = Options(
        seed=arguments.seed,
        count=arguments.count,
        kinds=tuple(arguments.kinds),
        servers=arguments.servers,
        pairs=arguments.pairs,
        steps=arguments.steps,
        faults_per_course=arguments.faults_per_course,
        stopped_seconds=arguments.stopped,
        starved_seconds=arguments.starved,
        patience=arguments.patience,
        minutes=arguments.minutes,
        tolerance=arguments.tolerance,
        deterministic=not arguments.batched,
    )
    with tempfile.TemporaryDirectory(prefix="faults_", ignore_cleanup_errors=True) as directory:
        if arguments.whole_run:
            found = kill_whole_runs(
                options, Path(directory), arguments.whole_run, arguments.results
            )
        else:
            found = Campaign(options, Path(directory), arguments.results).run()
    print(results.table(found))
    if found.failures:
        sys.exit(1)


def end_in_order(*_: object) -> None:
    """End as by Ctrl-C: runs are killed and directories deleted on the way."""
    # Once: a further signal would end that in the middle.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_in_order)
    main()
