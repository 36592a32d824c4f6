"""math-verify in a process of its own, because an answer can make it run for ever or eat the memory.

sympy computes 9^(9^(9^9)) in one call into C that no Python timeout interrupts. The process therefore asks the kernel
to kill it (SIGALRM, RLIMIT_AS) when a comparison takes too much, and the next comparison starts another one."""

import json
import logging
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

# wall-clock limit of one comparison; a slower one counts as not equivalent
SECONDS = 5.0
# address space of the process
MEMORY_BYTES = 4 << 30
# characters of an answer; a longer one counts as not equivalent
LONGEST = 2000


class MathVerifyProcess:
    """One process, used by one thread at a time; started when first needed, gone with the parent."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def equivalent(self, given: str, wanted: str) -> bool:
        """Whether math-verify finds two mathematical expressions (LaTeX or plain) equivalent.

        Raises RuntimeError if math-verify cannot be started at all."""
        if max(len(given), len(wanted)) > LONGEST:
            return False
        with self._lock:
            if self._process is None:
                self._process = self._start()
            reply = self._ask(self._process, json.dumps([given, wanted]))
            if reply is None:
                self.close()
            return reply == "true"

    def close(self) -> None:
        """End the process; the next comparison starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rl_loop.rewards.math_verify_process", str(self._seconds)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # importing sympy takes seconds on a busy machine; that is no comparison's time
        if self._ask(process, json.dumps(["1", "1"])) != "true":
            raise RuntimeError(f"math-verify does not start; run {' '.join(command)} and see its error")
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[str], question: str) -> str | None:
        """The answer, or None if the process died of the question."""
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        return process.stdout.readline().strip() or None


_process = MathVerifyProcess()
equivalent = _process.equivalent


def _same_after_simplifying(gold: list[Any], answer: list[Any]) -> bool:
    """What math-verify leaves out: cancelling in fractions, and i as the imaginary unit."""
    from sympy import Expr, I, simplify

    if not (gold and answer and isinstance(gold[0], Expr) and isinstance(answer[0], Expr)):
        return False
    rest = gold[0] - answer[0]
    return bool(simplify(rest.subs({symbol: I for symbol in rest.free_symbols if symbol.name == "i"})) == 0)


def _serve(seconds: float) -> None:
    """Answer questions until standard input ends."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # death, even in the middle of C code
    for line in sys.stdin:
        given, wanted = (rf"\boxed{{{text}}}" for text in json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            # without its own timeouts, which are Python signal handlers
            gold, answer = parse(wanted, parsing_timeout=None), parse(given, parsing_timeout=None)
            same = bool(verify(gold, answer, timeout_seconds=None)) or _same_after_simplifying(gold, answer)
        except (Exception, RecursionError, MemoryError):
            same = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
