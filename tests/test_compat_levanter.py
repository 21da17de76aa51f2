"""Levanter's page table over the core: rows, batches, clones, windows, and a model of its KV."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_bitwise_equal
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import swa_jax as swa
from swa_jax.compat.levanter import INVALID, PageBatchInfo, PageTable, is_invalid, is_valid

SEQS, PAGES, SIZE, COLUMNS, TOKENS = 4, 12, 4, 5, 10
KINDS = {
    "full": PageTable.init(PAGES, SEQS, SIZE, COLUMNS),
    "window": PageTable.init(PAGES, SEQS, SIZE, COLUMNS, sliding_window=5, max_swa_pages=9),
}
FULL = KINDS["full"]


class Named(NamedTuple):
    """What is read of an array with named axes."""

    array: jax.Array


def tokens(rows: list[int], places: list[int]):
    """A batch of T tokens, the unused ones without a row."""
    rest = TOKENS - len(rows)
    return np.array(rows + [-1] * rest, np.int32), np.array(places + [-1] * rest, np.int32)


def used(table: PageTable, count: int) -> PageTable:
    for _ in range(count):
        table, _ = table.assign_seq_id_to_seq()
    return table


# ---- one call each --------------------------------------------------------------------------


def test_sizes_are_those_that_were_asked_for():
    assert (FULL.num_pages, FULL.max_seqs, FULL.page_size, FULL.pages_per_seq) == (12, 4, 4, 5)
    assert FULL.max_len_per_seq == 20
    assert int(FULL.num_free_pages) == 12
    assert not FULL.page_ref_counts.any()
    assert (FULL.page_indices == INVALID).all()


def test_rows_are_taken_in_order_or_by_name():
    table, row = FULL.assign_seq_id_to_seq()
    assert int(row) == 0
    table, row = table.assign_seq_id_to_seq(2)
    assert int(row) == 2
    same, row = table.assign_seq_id_to_seq(jnp.int32(2))
    assert int(row) == INVALID
    assert_bitwise_equal(same, table)
    for right in (1, 3, INVALID):  # ids that do not exist ask for any row
        table, row = table.assign_seq_id_to_seq(Named(jnp.int32(-7)))
        assert int(row) == right
    assert int(table.current_num_seqs) == 4


def test_a_batch_gets_pages_in_the_order_of_its_rows():
    table = used(FULL, 4)
    table, info = table.allocate_for_seq(
        *tokens([2, 2, 0, 3, 3, 3, 3, 3], [0, 1, 0, 0, 1, 2, 3, 4])
    )
    assert info.slot_ids.tolist() == [2, 0, 3, INVALID]
    assert int(info.num_seqs) == 3
    assert info.cu_q_lens.tolist() == [0, 2, 3, 8, 8]
    assert info.seq_lens.tolist() == [2, 1, 5, INVALID]
    assert info.page_indices[:, :2].tolist() == [[0, INVALID], [1, INVALID], [2, 3], [INVALID] * 2]
    assert info.new_token_dests.tolist() == [0, 1, 4, 8, 9, 10, 11, 12, INVALID, INVALID]
    pages, places = info.pages_and_slots()
    assert pages.tolist() == [0, 0, 1, 2, 2, 2, 2, 3, INVALID, INVALID]
    assert places.tolist() == [0, 1, 0, 0, 1, 2, 3, 0, INVALID, INVALID]
    assert table.page_ref_counts.tolist() == [1] * 4 + [0] * 8
    assert table.seq_lens.tolist() == [1, 0, 2, 5]
    assert bool(info.ok)
    table, info = table.allocate_for_seq(*tokens([3, 2], [5, 1]))  # one goes on, one writes again
    assert info.new_token_dests.tolist()[:2] == [13, 1]
    assert table.seq_lens.tolist() == [1, 0, 2, 6]


def test_tokens_of_rows_that_are_not_in_use_have_no_place():
    table, info = used(FULL, 1).allocate_for_seq(*tokens([1, 0, 9, INVALID], [0, 0, 0, 0]))
    assert info.new_token_dests.tolist()[:4] == [INVALID, 0, INVALID, INVALID]
    assert info.slot_ids.tolist()[:2] == [1, 0]
    assert table.seq_lens.tolist() == [1, 0, 0, 0]
    assert int(info.num_seqs) == 2


@pytest.mark.parametrize(
    ("rows", "places"),
    [([0, 1], [3, 20]), ([0, 1], [3, 2**31 - 1]), ([0, 1], [3, 15])],
    ids=["past the row", "far past the row", "more than the batch's tokens"],
)
def test_a_batch_that_cannot_be_is_refused_whole(rows, places):
    before, _ = used(FULL, 2).allocate_for_seq(*tokens([0, 0], [0, 1]))
    table, info = before.allocate_for_seq(*tokens(rows, places))
    assert not info.ok
    assert int(table.refused) == 1
    assert table.faults()["bad_length"] == 1
    assert info.new_token_dests.tolist()[:2] == [INVALID] * 2
    assert table.seq_lens.tolist() == before.seq_lens.tolist()
    assert table.page_ref_counts.tolist() == before.page_ref_counts.tolist()


def test_short_memory_refuses_a_batch_and_a_clone():
    table = used(FULL, 4)
    for row in range(2):
        for start in (0, 10):
            batch = tokens([row] * 10, list(range(start, start + 10)))
            table, info = table.allocate_for_seq(*batch)
            assert info.ok
    table, info = table.allocate_for_seq(*tokens([2] * 9, list(range(9))))
    assert not info.ok  # three are wanted, two are left
    assert int(table.num_free_pages) == 2
    table, info = table.allocate_for_seq(*tokens([2] * 6, list(range(6))))
    assert info.ok
    cloned = table.clone_pages_from(2, 3)
    assert int(cloned.refused) == 2
    assert cloned.seq_lens.tolist() == [20, 20, 6, 0]
    assert (cloned.page_indices[3] == INVALID).all()
    cloned = cloned.clone_pages_from(0, 3)  # ends on a boundary: nothing is needed
    assert cloned.page_indices[3].tolist() == cloned.page_indices[0].tolist()
    assert not any(cloned.faults().values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_a_clone_shares_whole_pages_and_copies_the_last(kind, length):
    table = used(KINDS[kind], 1)
    if length:
        table, _ = table.allocate_for_seq(*tokens([0] * length, list(range(length))))
    cloned = table.clone_pages_from(0, 2)
    whole, part = divmod(length, SIZE)
    mine, theirs = cloned.page_indices[2].tolist(), cloned.page_indices[0].tolist()
    assert mine[:whole] == theirs[:whole]
    assert cloned.page_ref_counts[:whole].tolist() == [2] * whole
    assert cloned.seq_lens.tolist() == [length, 0, length, 0]
    assert cloned.used_mask.tolist() == [True, False, True, False]
    if part:
        assert mine[whole] != theirs[whole]
        assert is_valid(jnp.int32(mine[whole]))
        assert int(cloned.page_ref_counts[mine[whole]]) == 1
    assert mine[whole + bool(part) :] == [INVALID] * (COLUMNS - whole - bool(part))
    gone = cloned.free_pages(0).free_pages(2)
    assert int(gone.num_free_pages) == PAGES
    assert not any(gone.faults().values())
    swa.check(gone.state)


def test_a_clone_of_itself_or_of_no_row_is_nothing():
    table, _ = used(FULL, 1).allocate_for_seq(*tokens([0] * 5, list(range(5))))
    for pair in ((0, 0), (0, 4), (-1, 1), (INVALID, 1), (4, 0)):
        assert_bitwise_equal(table.clone_pages_from(*pair), table)


def test_a_row_that_is_cloned_into_gives_its_pages_up():
    table, _ = used(FULL, 2).allocate_for_seq(*tokens([0] * 5 + [1] * 5, [*range(5), *range(5)]))
    cloned = table.clone_pages_from(0, 1)
    assert int(cloned.num_free_pages) == PAGES - 3
    assert sorted(cloned.page_ref_counts.tolist()) == [0] * 9 + [1, 1, 2]


def test_rows_that_finished_go_together():
    table, _ = used(FULL, 1).allocate_for_seq(*tokens([0] * 8, list(range(8))))
    table = table.clone_pages_from(0, 1).clone_pages_from(0, 2)
    assert table.page_ref_counts.tolist()[:2] == [3, 3]
    mask = Named(jnp.array([True, False, True, True]))
    table = table.free_pages_for_finished(mask)
    assert table.page_ref_counts.tolist()[:2] == [1, 1]
    assert table.used_mask.tolist() == [False, True, False, False]
    assert int(table.free_pages(1).num_free_pages) == PAGES
    assert_bitwise_equal(table.free_pages(-1), table)
    assert_bitwise_equal(table.free_pages(INVALID), table)


def test_a_bumped_row_goes_on_in_a_new_page():
    table, _ = used(FULL, 1).allocate_for_seq(*tokens([0] * 5, list(range(5))))
    table = table.bump_seq_len_to_next_page(0)
    assert table.seq_lens.tolist() == [8, 0, 0, 0]
    table, info = table.allocate_for_seq(*tokens([0], [8]))
    assert info.new_token_dests.tolist()[0] == 8
    assert int(table.num_free_pages) == PAGES - 3


def test_extra_holders_keep_a_page_from_going():
    table, _ = used(FULL, 1).allocate_for_seq(*tokens([0] * 8, list(range(8))))
    table = table.increment_ref_counts_for_pages(table.page_indices[0], 2)
    assert table.page_ref_counts.tolist()[:3] == [3, 3, 0]
    assert int(table.free_pages(0).num_free_pages) == PAGES - 2
    table = FULL.increment_ref_counts_for_pages([0, INVALID, -1])
    assert table.faults()["double_free"] == 1  # nobody holds it


def test_a_shared_page_is_not_written_to():
    """Extra holders of a partly filled page: there is no clone of it to write into."""
    table, _ = used(FULL, 1).allocate_for_seq(*tokens([0] * 5, list(range(5))))
    table = table.increment_ref_counts_for_pages(table.page_indices[0])
    table, info = table.allocate_for_seq(*tokens([0], [5]))
    assert not info.ok
    assert table.faults()["still_mapped"] == 1


def test_layers_with_a_window_have_pages_of_their_own():
    table = used(KINDS["window"], 1)
    table, info = table.allocate_for_seq(*tokens([0] * 10, list(range(10))))
    assert info.swa_page_indices is not None
    assert info.new_swa_token_dests is not None
    assert is_valid(info.new_swa_token_dests).all()
    clone = table.clone_pages_from(0, 1)
    table = clone.free_out_of_window()
    assert table.evicted_lens.tolist() == [4, 4, 0, 0]
    assert is_invalid(table.swa_page_indices[:2, 0]).all()
    assert is_valid(table.swa_page_indices[:2, 1:3]).all()
    alone = clone.free_out_of_window(jnp.arange(SEQS) == 0)
    assert is_valid(alone.swa_page_indices[:2, 0]).all()  # the clone still reads it
    table, info = table.allocate_for_seq(*tokens([1], [10]))
    assert info.swa_pages_and_slots()[1][0] == 2
    with pytest.raises(ValueError, match="has no window"):
        FULL.free_out_of_window()


def test_wrong_host_input_is_named():
    with pytest.raises(ValueError, match=r"max_seqs must be an integer from 1 to 32767, got 0"):
        PageTable.init(4, 0, 4, 4)
    with pytest.raises(ValueError, match="max_swa_pages is for layers with a window"):
        PageTable.init(4, 4, 4, 4, max_swa_pages=3)
    with pytest.raises(ValueError, match=r"must agree in length.*got 2 and 1"):
        FULL.allocate_for_seq([0, 0], [0])
    with pytest.raises(ValueError, match=r"finished_mask must be bool\[4\].*int32\[4\]"):
        FULL.free_pages_for_finished(jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="seq_id must be a scalar"):
        FULL.free_pages([1])


# ---- as a pytree ----------------------------------------------------------------------------


def step(table: PageTable, rows, places):
    """Clone, grow both, end one: all in one program."""
    table = table.clone_pages_from(0, 1)
    table, info = table.allocate_for_seq(rows, places)
    return table.free_pages(0), info


def test_a_step_compiles_scans_and_batches():
    table, _ = used(KINDS["window"], 1).allocate_for_seq(*tokens([0] * 7, list(range(7))))
    batch = tuple(jnp.asarray(part) for part in tokens([0, 1], [7, 7]))
    right, info = step(table, *batch)
    assert isinstance(info, PageBatchInfo)
    jitted = jax.jit(step)(table, *batch)
    assert_bitwise_equal(jitted, (right, info))
    pair = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (table, *batch))
    batched = jax.vmap(step)(*pair)
    assert_bitwise_equal(jax.tree.map(lambda leaf: leaf[1], batched), (right, info))
    with jax.enable_x64(True):
        wide = jax.eval_shape(step, table, *batch)
    kinds = [jax.tree.map(lambda leaf: leaf.dtype, each) for each in (wide, (right, info))]
    assert kinds[0] == kinds[1]


# ---- any program ----------------------------------------------------------------------------


class TableMachine(RuleBasedStateMachine):
    """Rows with a text each, and the text that each place of the pool was computed from."""

    table = FULL

    def __init__(self) -> None:
        super().__init__()
        self.text: dict[int, list[int]] = {}
        self.done = dict.fromkeys(range(SEQS), 0)
        self.kv: dict[int, int] = {}
        self.words = itertools.count(1)

    @rule()
    def assign(self):
        self.table, row = self.table.assign_seq_id_to_seq()
        if len(self.text) < SEQS:
            self.text[int(row)] = []
        else:
            assert int(row) == INVALID

    @rule(more=st.lists(st.integers(0, 5), min_size=SEQS, max_size=SEQS))
    def grow(self, more):
        rows, places = [], []
        for row, count in zip(self.text, more, strict=False):
            start = len(self.text[row])
            count = max(0, min(count, COLUMNS * SIZE - start, TOKENS - len(rows)))
            rows += [row] * count
            places += range(start, start + count)
        self.table, info = self.table.allocate_for_seq(*tokens(rows, places))
        if info.ok:
            for row, dest in zip(rows, info.new_token_dests.tolist(), strict=False):
                self.text[row].append(next(self.words))
                self.kv[dest] = self.text[row][-1]

    @rule(src=st.integers(0, SEQS - 1), dst=st.integers(0, SEQS - 1))
    def clone(self, src, dst):
        if src not in self.text or src == dst:
            return
        before = int(self.table.refused)
        self.table = self.table.clone_pages_from(src, dst)
        if int(self.table.refused) > before:
            if dst in self.text:
                self.text[dst], self.done[dst] = [], 0
            return
        self.text[dst], self.done[dst] = list(self.text[src]), self.done[src]
        pages = self.table.page_indices[:, max(0, len(self.text[src]) - 1) // SIZE].tolist()
        if len(self.text[src]) % SIZE:
            for place in range(SIZE):
                self.kv[pages[dst] * SIZE + place] = self.kv.get(pages[src] * SIZE + place, 0)

    @rule(gone=st.lists(st.booleans(), min_size=SEQS, max_size=SEQS), one=st.booleans())
    def finish(self, gone, one):
        rows = [row for row in self.text if gone[row]][: 1 if one else SEQS]
        if one and rows:
            self.table = self.table.free_pages(rows[0])
        else:
            self.table = self.table.free_pages_for_finished(
                jnp.array([r in rows for r in range(4)])
            )
        for row in rows:
            del self.text[row]
            self.done[row] = 0

    @rule()
    def leave(self):
        if self.table.state.config.sliding_window:
            self.table = self.table.free_out_of_window()

    @invariant()
    def laws(self):
        table = jax.device_get(self.table)
        swa.check(self.table.state)
        assert not any(self.table.faults().values())
        held: Counter[int] = Counter()
        window = table.state.config.sliding_window
        of_swa = np.asarray(self.table.swa_page_indices)
        for row, text in self.text.items():
            assert int(table.seq_lens[row]) == len(text)
            pages = table.page_indices[row].tolist()
            used = -(-len(text) // SIZE)
            assert all(page == INVALID for page in pages[used:])
            held.update(pages[:used])
            for place, word in enumerate(text):
                assert self.kv[pages[place // SIZE] * SIZE + place % SIZE] == word
                if not window or place >= len(text) - window:
                    assert of_swa[row, place // SIZE] != INVALID
        counts = np.asarray(self.table.page_ref_counts)
        assert {page: int(counts[page]) for page in np.flatnonzero(counts).tolist()} == held
        assert table.used_mask.tolist() == [row in self.text for row in range(SEQS)]

    def teardown(self):
        table = self.table.free_pages_for_finished(jnp.ones(SEQS, bool))
        size = table.state.config
        left = swa.full_available_size(table.state), swa.swa_available_size(table.state)
        assert (int(left[0]), int(left[1])) == (size.full_tokens, size.swa_tokens)


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.long), "window"])
def test_rows_that_clone_and_grow_keep_their_text(kind):
    machine = type("Machine", (TableMachine,), {"table": KINDS[kind]})
    case = machine.TestCase
    case.settings = settings(
        max_examples=max(settings().max_examples // 2, 10),
        stateful_step_count=25,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        report_multiple_bugs=False,
    )
    case("runTest").runTest()
