"""Fault injection into runs over Ray, and comparison with an undisturbed run.

options.py       options of the test
observed_run.py  a run with its attempts, settings and records
kinds.py         kinds of faults
pairs.py         two faults at once
engine.py        an engine that injects false answers
server.py        the same engine behind SGLang's protocol
checks.py        conditions of a failed fault
injector.py      injects faults in sequence
whole_run.py     kills whole runs repeatedly
results.py       file of results and its table
__main__.py      command line
"""

from tests.faults.observed_run import CONFIG, Attempt, ObservedRun
from tests.faults.options import Options

__all__ = ["CONFIG", "Attempt", "ObservedRun", "Options"]
