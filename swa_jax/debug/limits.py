"""How large a program may be, and how what is wrong with one is quoted.

A program may come from a stranger: nothing in it can make reading, checking or running it take
more memory than these bounds allow.
"""

import reprlib

MOST_FILE_BYTES = 8 * 2**20
MOST_CALLS = 10_000
MOST_VALUES = 2**20  # numbers in the arguments of all calls together
MOST_HANDED_OUT = 2**20  # places in the answers of all calls together
MOST_SHAPES = 256  # of calls with their arguments: each is compiled on its own
MOST_STATE_BYTES = 2**26  # of one state
MOST_WORK_BYTES = 2**35  # of all states that are looked at, one for each call
MOST_KEPT_BYTES = 2**29  # of all states of a timeline
MOST_NAME = 100  # letters of an owner's name
MOST_ABOUT = 4000  # letters of what a program is about

_QUOTES = reprlib.Repr()
_QUOTES.maxlevel, _QUOTES.maxlist, _QUOTES.maxdict = 2, 4, 4
_QUOTES.maxstring, _QUOTES.maxlong, _QUOTES.maxother = 60, 30, 60


def shown(value: object) -> str:
    """A value for a message: on one line, and not longer than is of use."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python may refuse to print it
        return f"an integer of {value.bit_length()} bits"
    text = _QUOTES.repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
