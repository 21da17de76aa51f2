"""Time travel: record calls, step through their states, compare them, make a failure small.

For tests and notebooks, on the host.
"""

from swa_jax.debug.calls import CALLS
from swa_jax.debug.difference import Difference, diff
from swa_jax.debug.files import load, save
from swa_jax.debug.outcomes import record_outcomes
from swa_jax.debug.program import Call, Outcome, Program
from swa_jax.debug.recorder import Recorder
from swa_jax.debug.shrink import shrink
from swa_jax.debug.timeline import Timeline, run
from swa_jax.debug.watch import Failure, first_failure

__all__ = [
    "CALLS",
    "Call",
    "Difference",
    "Failure",
    "Outcome",
    "Program",
    "Recorder",
    "Timeline",
    "diff",
    "first_failure",
    "load",
    "record_outcomes",
    "run",
    "save",
    "shrink",
]
