"""Comparisons in separate processes: limits, crashes, and leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest

from rl_loop import forked_pool
from rl_loop.rewards import CheckerError, math_answer
from rl_loop.rewards.comparison_pool import ComparisonPool
from tests.support.processes import list_children
from tests.support.waiting import wait_until

# Each expression computes for minutes inside C or sympy.
SLOW = [r"\binom{10^{9}}{5\cdot 10^{8}}", "9^{9^{9^{9}}}"]
UNREACHABLE_SECONDS = 600.0
"""Limit of processor time in seconds that no comparison of a test reaches."""


@pytest.fixture
def pool() -> Iterator[ComparisonPool]:
    found = ComparisonPool(seconds=1.0)
    assert found.equivalent_texts("1/2", "0.5")
    yield found
    found.close()


def own_processes(pool: ComparisonPool) -> list[psutil.Process]:
    assert pool.processes._server is not None
    server = psutil.Process(pool.processes._server.pid)
    return [server, *list_children(server)]


def computing(pool: ComparisonPool) -> list[psutil.Process]:
    """Return the workers that are busy with a slow comparison."""
    busy = []
    for worker in own_processes(pool)[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            # A killed worker keeps its processor time until the server reaps it.
            is_alive = worker.status() != psutil.STATUS_ZOMBIE
            if is_alive and worker.cpu_times().user > 0.05:
                busy.append(worker)
    return busy


def end_slow_comparisons(pool: ComparisonPool, is_done: Callable[[], bool]) -> None:
    """Signal busy workers as their time limit does, until ``is_done`` returns True."""
    pool.processes.seconds = 0.0
    while not is_done():
        for worker in computing(pool):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGPROF)
        time.sleep(0.05)


@pytest.mark.parametrize("slow", [SLOW[0], pytest.param(SLOW[1], marks=pytest.mark.slow)])
def test_answer_beyond_the_time_limit_is_wrong(pool, slow: str) -> None:
    assert not pool.equivalent_texts(slow, "4")
    assert pool.equivalent_texts("x+1", "1+x")


def test_16_slow_expressions_do_not_delay_another_answer() -> None:
    """The slow comparisons compute far below their limit while the other one finishes."""
    pool = ComparisonPool(seconds=UNREACHABLE_SECONDS)
    assert pool.equivalent_texts("1/2", "0.5")
    with ThreadPoolExecutor(17) as threads:
        slow = [threads.submit(pool.equivalent_texts, SLOW[i % len(SLOW)], "4") for i in range(16)]
        try:
            wait_until(lambda: len(computing(pool)) == 16, seconds=60)
            other = threads.submit(pool.equivalent_texts, "x+1", "1+x")
            assert other.result(timeout=60)
            assert not any(future.done() for future in slow)
        finally:
            end_slow_comparisons(pool, lambda: all(future.done() for future in slow))
        assert not any(future.result() for future in slow)
    pool.close()


def test_more_slow_expressions_than_workers_are_all_judged() -> None:
    pool = ComparisonPool(seconds=0.2, workers=2)
    with ThreadPoolExecutor(7) as threads:
        slow = [threads.submit(pool.equivalent_texts, SLOW[0], "4") for _ in range(6)]
        assert threads.submit(pool.equivalent_texts, "x+1", "1+x").result()
        assert not any(future.result() for future in slow)
    pool.close()


def test_judge_on_the_event_loop_is_not_delayed_by_slow_answers(monkeypatch) -> None:
    pool = ComparisonPool(seconds=UNREACHABLE_SECONDS)
    monkeypatch.setattr(math_answer, "equivalent_texts", pool.equivalent_texts)

    async def main() -> None:
        assert await math_answer.is_correct_async(r"\boxed{x+1}", "1+x")
        slow = [
            asyncio.create_task(math_answer.is_correct_async(rf"\boxed{{{SLOW[0]}}}", "4"))
            for _ in range(16)
        ]
        try:
            busy = partial(wait_until, lambda: len(computing(pool)) == 16, seconds=60)
            await asyncio.to_thread(busy)
            assert await asyncio.wait_for(math_answer.is_correct_async(r"\boxed{x+2}", "2+x"), 60)
            assert not any(task.done() for task in slow)
        finally:
            await asyncio.to_thread(
                end_slow_comparisons, pool, lambda: all(task.done() for task in slow)
            )
        assert not any(await asyncio.gather(*slow))

    asyncio.run(main())
    pool.close()


def test_next_answer_is_judged_after_idle_workers_died(pool) -> None:
    for worker in own_processes(pool)[1:]:
        worker.kill()
        wait_until(lambda w=worker: not w.is_running())
    assert pool.equivalent_texts("x+1", "1+x")


def test_dead_server_is_restarted(pool) -> None:
    for process in own_processes(pool):
        process.kill()
    assert pool.equivalent_texts("x+1", "1+x")


def test_death_of_a_new_worker_ends_no_other_comparison(patient_pool, monkeypatch) -> None:
    """The server keeps its other workers, which compute, and forks one more."""
    is_ready = forked_pool._is_ready
    server = own_processes(patient_pool)[0]
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(patient_pool.equivalent_texts, SLOW[0], "4")
        wait_until(lambda: computing(patient_pool))
        (worker,) = computing(patient_pool)

        outcomes = iter([False])
        monkeypatch.setattr(
            forked_pool, "_is_ready", lambda socket: next(outcomes, True) and is_ready(socket)
        )
        assert patient_pool.equivalent_texts("x+1", "1+x")
        assert next(outcomes, None) is None, "no new worker was requested"
        assert own_processes(patient_pool)[0] == server
        assert worker in computing(patient_pool)
        assert not slow.done()
        end_slow_comparisons(patient_pool, slow.done)
        assert not slow.result()


def kill_busy_workers(pool: ComparisonPool, times: int) -> bool:
    """Kill the workers of a comparison in sequence. Return its verdict."""
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(pool.equivalent_texts, SLOW[0], "4")
        for death in range(times):
            wait_until(lambda: computing(pool))
            (worker,) = computing(pool)
            worker.kill()
            wait_until(lambda w=worker: w not in computing(pool))
            if death == 0:
                assert not slow.done(), "one death is nobody's fault"
        return slow.result()


@pytest.fixture
def patient_pool() -> Iterator[ComparisonPool]:
    pool = ComparisonPool(seconds=UNREACHABLE_SECONDS)
    assert pool.equivalent_texts("1/2", "0.5")
    yield pool
    assert pool.equivalent_texts("x+1", "1+x")
    pool.close()


def test_answer_that_crashes_the_checker_is_wrong(patient_pool) -> None:
    """Another comparison succeeds, so the checker works and the answer caused the crash."""
    assert not kill_busy_workers(patient_pool, times=2)


def test_checker_failure_when_machine_out_of_memory(patient_pool, monkeypatch) -> None:
    counts = iter((3, 4))
    monkeypatch.setattr(forked_pool, "out_of_memory_kills", lambda: next(counts))
    with pytest.raises(CheckerError, match="two worker processes"):
        kill_busy_workers(patient_pool, times=2)
    monkeypatch.undo()


def test_checker_failure_when_every_question_kills_it(patient_pool, monkeypatch) -> None:
    monkeypatch.setattr(patient_pool.processes, "control", ())  # no pair
    with pytest.raises(CheckerError, match="two worker processes"):
        kill_busy_workers(patient_pool, times=2)
    monkeypatch.undo()


def test_checker_that_cannot_start_raises_with_the_reason(monkeypatch) -> None:
    pool = ComparisonPool()
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr(forked_pool.sys, "executable", "/nowhere/python")
    with pytest.raises(
        CheckerError, match=r"the process that compares answers does not start.*/nowhere/python"
    ):
        pool.equivalent_texts("x+1", "1+x")

    monkeypatch.undo()
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(
        CheckerError, match=r"the process that compares answers does not start: .*encodings"
    ):
        pool.equivalent_texts("x+1", "1+x")

    monkeypatch.undo()
    assert pool.equivalent_texts("x+1", "1+x")
    pool.close()


def test_memory_is_bounded(pool) -> None:
    assert not pool.equivalent_texts(
        "+".join(f"10^{{{99_000 + i}}}" for i in range(100)) + "+2^{2^{33}}", "4"
    )
    assert pool.equivalent_texts("x+1", "1+x")


def test_close_leaves_no_process(pool) -> None:
    with ThreadPoolExecutor(3) as threads:
        busy = [threads.submit(pool.equivalent_texts, SLOW[0], "4") for _ in range(3)]
        wait_until(lambda: len(own_processes(pool)) > 3)
        watched = own_processes(pool)
        pool.close()
        for future in busy:
            with contextlib.suppress(CheckerError):
                assert not future.result()
    pool.close()
    wait_until(lambda: not any(process.is_running() for process in watched))


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_parent(end: signal.Signals) -> None:
    code = (
        "import threading, time\n"
        "from rl_loop.rewards.comparison_pool import equivalent_texts\n"
        "assert equivalent_texts('x+1', '1+x')\n"
        f"threading.Thread(target=equivalent_texts, args=({SLOW[0]!r}, '4')).start()\n"
        "time.sleep(0.2)\n"
        "print('asked', flush=True)\n"
        "time.sleep(60)\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    assert asker.stdout.readline() == "asked\n"
    left = psutil.Process(asker.pid).children(recursive=True)
    assert len(left) >= 2
    asker.send_signal(end)
    asker.communicate()
    wait_until(lambda: not any(process.is_running() for process in left))


def test_ctrl_c_does_not_interrupt_the_checker(pool) -> None:
    for process in own_processes(pool):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    before = {process.pid for process in own_processes(pool)}
    assert pool.equivalent_texts("x+1", "1+x")
    assert before & {process.pid for process in own_processes(pool)} == before


def test_concurrent_threads_get_their_own_verdicts(pool) -> None:
    wrong: list[int] = []

    def ask(i: int) -> None:
        for j in range(20):
            number = 100 * i + j
            if not pool.equivalent_texts(f"x+{number}", f"{number}+x") or pool.equivalent_texts(
                f"x+{number}", f"{number + 1}+x"
            ):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
