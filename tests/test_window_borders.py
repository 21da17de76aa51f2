"""`free_out_of_window` where a row's table, window and evicted tokens end in different places."""

import pytest
from oracle import Sizes
from pair import Pair

SIZES = Sizes(32, 24, 4, window=4)


@pytest.mark.parametrize(
    ("seq_len", "evicted", "faults"),
    [
        (36, 0, 0),  # the frontier is the table's last column
        (37, 0, 0),
        (40, 0, 1),  # a page past it
        (500, 0, 1),
        (500, 496, 0),  # nothing is left to give back, so nothing is past the table
        (500, 512, 0),
        (500, 492, 1),
    ],
)
def test_a_frontier_past_the_table_counts_where_it_would_free_something(seq_len, evicted, faults):
    state = Pair(SIZES)
    slots = state.extend(0, 11)
    state.free_out_of_window([slots], [seq_len], [evicted])
    assert sum(state.faults.values()) == faults
