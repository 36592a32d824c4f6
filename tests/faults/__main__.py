"""Injects faults into a run over Ray and compares the run with an undisturbed one.

    python -m tests.faults                       # one fault of every kind
    python -m tests.faults --count 200 --seed 7 --minutes 120 --results faults.jsonl
    python -m tests.faults --kinds kill_worker answer_nan --count 4
    python -m tests.faults --servers 2           # rollouts with mock SGLang servers
    python -m tests.faults --pairs --count 50    # two faults at a time
    python -m tests.faults --whole-run 20        # kill -9 of all processes, 20 times
    python -m tests.faults --table faults.jsonl  # table of one or several files of results

A small policy trains on the CPU with all real parts: Ray, Megatron, the sandbox, the checker of
answers, checkpoints, recorded episodes. Faults happen at random times:

    kill_*      SIGKILL of a trainer rank, a rollout worker, the server that checks answers, the
                server of a sandbox, the driver, Ray's node, Ray's control store, or the whole run
    stop        SIGSTOP of one of these processes (except Ray's), and SIGCONT --stopped later
    starve      two busy loops per core
    cut         all TCP connections on the loopback of a process of the run are closed (root)
    fill        the run's file system, a small one, is full (root)
    corrupt_*   a bit flips in the newest checkpoint, in a recorded episode file, or in the weights
                sent to the engines
    answer_*    an engine's answer has NaN log-probs, a future weight version, or belongs to
                another request

With --servers, processes with SGLang's protocol sample. They get the policy's weights from the
trainer by gloo and contain the embedded engine (server.py). All faults above and the following ones
are injected:

    kill_server*   SIGKILL of a server, or its exit at a call of a weight sync
    stop_server    SIGSTOP, and SIGCONT --stopped later
    cut_server     a server closes its connections in the middle of an answer
    keep_bucket    a server reports that it has loaded a tensor, and keeps the old bytes
    answer_old     an answer has the previous weights
    answer_routes  all routed experts of an answer are 0

With --pairs, every fault consists of two, the second within 3 seconds of the first. The pair may
have every outcome that one of its faults may have. The run must recover if it must recover from
each. A false answer may be lost with its process.

Within --patience seconds, the run either completes another step, or ends with the reason in its
last line and without processes. The patience is multiplied by the load average per core if this is
above 1. A run that has ended is continued with ``--resume``. A fault fails in these cases:

- The run does neither in time.
- The loss of a step differs from the undisturbed run. The engine is deterministic, so losses must
  be equal bit by bit, unless --tolerance allows a difference.
- No message names the damage.

A run has --faults-per-run faults. It fails if a step is missing or was recorded twice, or if a
step was trained on wrong episodes, on an episode twice, or on episodes of other weights.

Random choices depend on --seed, except the times within a step, which depend on the speed of the
machine. With --results, every fault is written to this file immediately, and a second call of the
command continues with the missing faults of its seed. Exits with code 1 after any failure. Ctrl-C
and SIGTERM stop the test and all its processes; faults of the current run do not count.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults import results
from tests.faults.injector import FaultInjector
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
    add("--steps", type=int, default=Options.steps, help="steps of a run in which faults happen")
    add("--faults-per-run", type=int, default=Options.faults_per_run)
    add("--stopped", type=float, default=Options.stopped_seconds, help="seconds of SIGSTOP")
    add("--starved", type=float, default=Options.starved_seconds, help="seconds of busy loops")
    add("--patience", type=float, default=Options.patience, help="seconds until it has recovered")
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
        faults_per_run=arguments.faults_per_run,
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
            found = FaultInjector(options, Path(directory), arguments.results).run()
    print(results.table(found))
    if found.failures:
        sys.exit(1)


def end_in_order(*_: object) -> None:
    """Exit as after Ctrl-C. Kill runs and delete directories."""
    # Ignore further signals, because they would interrupt the cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_in_order)
    main()
