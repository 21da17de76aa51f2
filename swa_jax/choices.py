"""Names and bounds that the command line shares with what it runs.

They stand alone so that a shell's completion, which loads this and not the rest, needs no JAX.
"""

POLICIES = ("lru", "lfu", "fifo", "priority", "cost")  # which cached pages leave first
PLACEMENTS = ("prefix", "round-robin")  # which rank of a replay a request goes to
DEALS = ("round-robin", "least-loaded")  # which rank of a plan
DEFAULT_HBM = "40GiB"
MAX_REQUESTS = 2_000_000  # of a trace, which is held in memory
EVENT_SLICE_STEPS = 8  # a block stored and evicted between two looks is missed
