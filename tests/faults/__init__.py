"""Injects faults into runs over Ray and compares what becomes of them with an undisturbed run.

options.py    what a campaign does
course.py     a run in as many attempts as it takes, its settings and what it has recorded
kinds.py      the kinds of faults
pairs.py      two faults at once
engine.py     an engine that lies when it is told to
server.py     the same engine behind SGLang's protocol
checks.py     when a fault counts as failed
campaign.py   injects one fault after the other
whole_run.py  kills whole runs again and again
results.py    the file of results and its table
__main__.py   the command, and what its options mean
"""

from tests.faults.course import CONFIG, Attempt, Course
from tests.faults.options import Options

__all__ = ["CONFIG", "Attempt", "Course", "Options"]
