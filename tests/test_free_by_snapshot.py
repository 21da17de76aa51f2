"""`free_swa` by an earlier state: what several tokens of a page name goes once."""

import pytest
from oracle import Sizes
from pair import Pair

SIZES = Sizes(32, 24, 4, window=4)


@pytest.mark.parametrize("cleared", [False, True])
def test_tokens_of_one_page_give_its_swa_side_back_once(cleared):
    state = Pair(SIZES)
    slots = state.extend(0, 6)
    then = state.snapshot()
    if cleared:  # nobody maps to the pages any more, and they are held still
        state.clear_mapping(slots)
    state.free_swa(slots, owner=then)
    assert state.left == (24, 24)
    state.free_swa(slots, owner=then)
    assert state.left == (24, 24)
    assert state.faults["double_free"] == 2
