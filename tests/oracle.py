"""A plain allocator to compare against: one page at a time, with sets, dicts and deques.

It says what every call means, in the slowest and most direct way, and knows nothing of JAX.
Pages are handed out first in, first out: 1, 2, 3, ... at the start, freed pages last.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Sequence

FAULT_KINDS = (
    "double_free",
    "out_of_range",
    "unmapped",
    "still_mapped",
    "nested_group",
    "misaligned",
    "bad_length",
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes in tokens. `pure` means that there is one pool and `full_tokens == swa_tokens`."""

    full_tokens: int
    swa_tokens: int
    page_size: int = 1
    window: int | None = None
    pure: bool = False
    chunked: bool = False

    @property
    def full_pages(self) -> int:
        return self.full_tokens // self.page_size

    @property
    def swa_pages(self) -> int:
        return self.swa_tokens // self.page_size


@dataclasses.dataclass
class OracleGrant:
    slots: list[int]
    count: int
    ok: bool
    full_short: int = 0
    swa_short: int = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """One request of a batch: it grows from `prefix` to `seq` tokens."""

    prefix: int
    seq: int
    last_loc: int
    tail: int

    @property
    def grows(self) -> int:
        return self.seq - self.prefix


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def frontier(n: int, page: int, window: int, *, chunked: bool = False) -> int:
    """Tokens below this have left the window, counted in whole pages."""
    dead = (max(n, 0) // window) * window if chunked else max(0, n - window)
    return dead // page * page


def insert_frontier(end: int, page: int, window: int, *, chunked: bool = False) -> int:
    """The same for a prefix that goes into a tree: its last page must stay live."""
    return frontier(end - 1 if chunked else end, page, window, chunked=chunked)


class Pool:
    """Free pages in the order of granting, pages held back by a group, pages held."""

    def __init__(self, pages: int) -> None:
        self.free: deque[int] = deque(range(1, pages + 1))
        self.pending: list[int] = []
        self.held: set[int] = set()

    def take(self, count: int) -> list[int]:
        taken = [self.free.popleft() for _ in range(count)]
        self.held.update(taken)
        return taken

    def give(self, pages: Sequence[int], *, later: bool) -> None:
        self.held.difference_update(pages)
        if later:
            self.pending.extend(pages)
            return
        self.free.extend(pages)
        # The queue is one ring: k pages that jump ahead push the first k waiting ones behind.
        moved = min(len(pages), len(self.pending))
        self.pending = self.pending[moved:] + self.pending[:moved]

    def release_pending(self) -> None:
        self.free.extend(self.pending)
        self.pending = []


class Oracle:
    """The allocator as plain data. Calls have the names and the arguments of the package."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.page = sizes.page_size
        self.swa = Pool(sizes.swa_pages)
        self.full = Pool(sizes.full_pages)  # with one pool only its `held` is used
        self.map: dict[int, int] = {}
        self.group_open = False
        self.faults: Counter[str] = Counter(dict.fromkeys(FAULT_KINDS, 0))
        self.unsure = False  # the last call broke several rules at once: which count is open

    def copy(self) -> Oracle:
        return copy.deepcopy(self)

    # ---- what is left -------------------------------------------------------------------

    def full_available_size(self) -> int:
        return len((self.swa if self.sizes.pure else self.full).free) * self.page

    def swa_available_size(self) -> int:
        return len(self.swa.free) * self.page

    def available_size(self) -> int:
        return min(self.full_available_size(), self.swa_available_size())

    def translate_full_to_swa(self, slots: Iterable[int]) -> list[int]:
        return [self._translate(slot) for slot in slots]

    def _translate(self, slot: int) -> int:
        if slot == -1:
            return -1
        if slot < 0:
            return 0
        swa_page = self.map.get(slot // self.page, 0)
        return swa_page * self.page + slot % self.page if swa_page else 0

    def check(self) -> None:
        """The laws on the oracle itself, so that a wrong oracle does not go unseen."""
        pools = [(self.swa, self.sizes.swa_pages)]
        if not self.sizes.pure:
            pools.append((self.full, self.sizes.full_pages))
        for pool, pages in pools:
            everywhere = [*pool.free, *pool.pending, *pool.held]
            assert sorted(everywhere) == list(range(1, pages + 1)), everywhere
        assert len(set(self.map.values())) == len(self.map), self.map
        assert set(self.map) <= self.full.held, (self.map, self.full.held)
        assert set(self.map.values()) <= self.swa.held, (self.map, self.swa.held)
        if self.sizes.pure:
            assert all(full == swa for full, swa in self.map.items()), self.map

    # ---- grants ---------------------------------------------------------------------------

    def alloc(self, num_tokens: int, *, capacity: int) -> OracleGrant:
        broken: Counter[str] = Counter()
        if num_tokens < 0 or num_tokens > capacity:
            broken["bad_length"] += 1
        if num_tokens % self.page:
            broken["misaligned"] += 1
        if broken:
            return self._refuse(broken, capacity)
        pages = num_tokens // self.page
        return self._grant([Row(0, pages * self.page, -1, pages * self.page)], capacity)

    def alloc_extend(
        self,
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        last_loc: Sequence[int],
        *,
        capacity: int,
    ) -> OracleGrant:
        tails = [seq - prefix for prefix, seq in zip(prefix_lens, seq_lens, strict=True)]
        return self._extend(prefix_lens, seq_lens, last_loc, tails, capacity)

    def alloc_extend_swa_tail(
        self,
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        last_loc: Sequence[int],
        swa_tail_lens: Sequence[int],
        *,
        capacity: int,
    ) -> OracleGrant:
        return self._extend(prefix_lens, seq_lens, last_loc, swa_tail_lens, capacity)

    def alloc_decode(
        self,
        seq_lens: Sequence[int],
        last_loc: Sequence[int],
        active: Sequence[bool] | None = None,
    ) -> OracleGrant:
        batch = len(seq_lens)
        rows = [i for i in range(batch) if active is None or active[i]]
        seq = [seq_lens[i] for i in rows]
        locs = [last_loc[i] for i in rows]
        grant = self._extend([n - 1 for n in seq], seq, locs, [1] * len(rows), batch)
        slots = [0] * batch
        if grant.ok:
            for i, slot in zip(rows, grant.slots, strict=False):
                slots[i] = slot
        return dataclasses.replace(grant, slots=slots)

    def _extend(self, prefix_lens, seq_lens, last_loc, tails, capacity: int) -> OracleGrant:
        rows = [Row(*each) for each in zip(prefix_lens, seq_lens, last_loc, tails, strict=True)]
        broken = self._broken_rules(rows, capacity)
        return self._refuse(broken, capacity) if broken else self._grant(rows, capacity)

    def _broken_rules(self, rows: Sequence[Row], capacity: int) -> Counter[str]:
        broken: Counter[str] = Counter()
        continued: Counter[int] = Counter()
        wrong_offset: set[int] = set()
        total = 0
        for row in rows:
            if row.prefix < 0 or row.grows < 0 or not 0 <= row.tail <= row.grows:
                broken["bad_length"] += 1
                continue
            total += row.grows
            if not self._continues(row) or self._is_homeless(row):
                continue
            page = row.last_loc // self.page
            if not self._is_live(page):
                broken["out_of_range"] += 1
                continue
            if row.last_loc % self.page != (row.prefix - 1) % self.page:
                broken["misaligned"] += 1
                wrong_offset.add(page)
            elif continued[page]:
                broken["misaligned"] += 1
            continued[page] += 1
        # A page that is named twice, and once at a wrong offset: one fault or two.
        self.unsure |= any(continued[page] > 1 for page in wrong_offset)
        if total > capacity:
            self.unsure |= bool(broken)
            broken["bad_length"] += 1
        return broken

    def _continues(self, row: Row) -> bool:
        return row.grows > 0 and row.prefix % self.page != 0

    def _is_homeless(self, row: Row) -> bool:
        """With one pool: the last token lies before a tail, was kept nowhere and has slot 0."""
        return self.sizes.pure and 0 <= row.last_loc < self.page

    def _is_live(self, page: int) -> bool:
        """Whether a request may go on writing into this page. With one pool: KV still there."""
        return page in self.full.held and (not self.sizes.pure or page in self.map)

    def _refuse(self, broken: Counter[str], capacity: int) -> OracleGrant:
        self.unsure |= len(broken) > 1
        self.faults.update(broken)
        return OracleGrant([0] * capacity, 0, False)

    def _new_pages(self, row: Row) -> tuple[range, range, bool]:
        """Page places in the row that are new, those with an SWA side, and if it is repaired."""
        first, end = ceil_div(row.prefix, self.page), ceil_div(row.seq, self.page)
        if row.grows == 0:
            return range(0), range(0), False
        tail_page = (row.seq - row.tail) // self.page if row.tail else end
        repaired = (
            self._continues(row)
            and row.tail > 0
            and tail_page < first
            and row.last_loc // self.page not in self.map
        )
        return range(first, end), range(max(first, tail_page), end), repaired

    def _grant(self, rows: Sequence[Row], capacity: int) -> OracleGrant:
        plans = [self._new_pages(row) for row in rows]
        need_swa = sum(len(swa) + repaired for _, swa, repaired in plans)
        need_full = need_swa if self.sizes.pure else sum(len(full) for full, _, _ in plans)
        full_short = max(0, need_full - self.full_available_size() // self.page)
        swa_short = max(0, need_swa - self.swa_available_size() // self.page)
        if full_short or swa_short:
            return OracleGrant([0] * capacity, 0, False, full_short, swa_short)
        slots: list[int] = []
        for row, plan in zip(rows, plans, strict=True):
            slots += self._grant_row(row, *plan)
        count = len(slots)
        return OracleGrant(slots + [0] * (capacity - count), count, True)

    def _grant_row(self, row: Row, full: range, swa: range, repaired: bool) -> list[int]:
        pages: dict[int, int] = {}  # place in the row -> full page
        if self._continues(row):
            pages[row.prefix // self.page] = row.last_loc // self.page
        if repaired and self._is_homeless(row):
            page = self.swa.take(1)[0]
            pages[row.prefix // self.page] = self.map[page] = page
            self.full.held.add(page)
        elif repaired:
            self.map[row.last_loc // self.page] = self.swa.take(1)[0]
        for place in full:
            swa_page = self.swa.take(1)[0] if place in swa else 0
            full_page = swa_page if self.sizes.pure else self.full.take(1)[0]
            pages[place] = full_page
            self.map.pop(full_page, None)
            if swa_page:
                self.map[full_page] = swa_page
                self.full.held.add(full_page)
        return [self._slot(pages, i) for i in range(row.prefix, row.seq)]

    def _slot(self, pages: dict[int, int], token: int) -> int:
        page = pages[token // self.page]
        return page * self.page + token % self.page if page else 0

    # ---- frees ----------------------------------------------------------------------------

    def _pages(self, slots: Iterable[int]) -> list[int]:
        """The distinct pages in the order of their first place; padding is skipped."""
        pages: dict[int, None] = {}
        for slot in slots:
            if slot < 0 or slot >= self.sizes.full_tokens + self.page:
                self.faults["out_of_range"] += 1
            elif slot >= self.page:
                pages[slot // self.page] = None
        return list(pages)

    def free(self, slots: Iterable[int]) -> None:
        full, swa = [], []
        for page in self._pages(slots):
            if page not in self.full.held:
                self.faults["double_free"] += 1
                continue
            full.append(page)
            if page in self.map:
                swa.append(self.map.pop(page))
        self._release(full, swa, later=self.group_open)

    def free_swa(self, slots: Iterable[int], owner: Oracle | None = None) -> None:
        if owner is None:
            self._free_swa(slots, later=self.group_open)
        else:
            self._free_swa_as(slots, owner)

    def free_swa_grouped(self, slots: Iterable[int]) -> None:
        self._free_swa(slots, later=True)

    def _free_swa(self, slots: Iterable[int], *, later: bool) -> None:
        swa = []
        for page in self._pages(slots):
            if page not in self.full.held:
                self.faults["double_free"] += 1
            elif page not in self.map:
                self.faults["unmapped"] += 1
            else:
                swa.append(self.map.pop(page))
        self._release([], swa, later=later)

    def _free_swa_as(self, slots: Iterable[int], owner: Oracle) -> None:
        """Frees the SWA pages that these slots had when `owner` was taken."""
        swa = []
        for page in self._pages(slots):
            then = owner.map.get(page, 0)
            if page not in owner.full.held:
                self.faults["double_free"] += 1
            elif not then:
                self.faults["unmapped"] += 1
            elif self.map.get(page) == then:
                swa.append(self.map.pop(page))
            elif then not in self.swa.held:
                self.faults["double_free"] += 1
            elif then not in self.map.values():
                swa.append(then)
        self._release([], swa, later=self.group_open)

    def free_full(self, slots: Iterable[int]) -> None:
        full = []
        for page in self._pages(slots):
            if page not in self.full.held:
                self.faults["double_free"] += 1
            elif page in self.map:
                self.faults["still_mapped"] += 1
            else:
                full.append(page)
        self._release(full, [], later=self.group_open)

    def free_segment(self, slots: Sequence[int]) -> None:
        self.free(self._page_starts(slots))

    def free_swa_segment(self, slots: Sequence[int]) -> None:
        self.free_swa(self._page_starts(slots))

    def _page_starts(self, slots: Sequence[int]) -> list[int]:
        starts = []
        for slot in slots[:: self.page]:
            inside = self.page <= slot < self.sizes.full_tokens + self.page
            if inside and slot % self.page:
                self.faults["misaligned"] += 1
            else:
                starts.append(slot)
        return starts

    def _release(self, full: Sequence[int], swa: Sequence[int], *, later: bool) -> None:
        if self.sizes.pure:
            self.full.held.difference_update(full)
        else:
            self.full.give(full, later=later)
        self.swa.give(swa, later=later)

    def free_group_begin(self) -> None:
        if self.group_open:
            self.faults["nested_group"] += 1
        self.group_open = True

    def free_group_end(self) -> None:
        self.group_open = False
        self.full.release_pending()
        self.swa.release_pending()

    # ---- mapping --------------------------------------------------------------------------

    def set_full_to_swa_mapping(self, full_slots: Sequence[int], swa_slots: Sequence[int]) -> None:
        pairs = []
        for full_slot, swa_slot in zip(full_slots, swa_slots, strict=True):
            pair = self._settable(full_slot, swa_slot)
            if pair:
                pairs.append(pair)
        first_swa = dict(reversed(pairs))
        first_full = {swa: full for full, swa in reversed(pairs)}
        agreed = []
        for full, swa in pairs:
            if first_swa[full] == swa and first_full[swa] == full:
                agreed.append((full, swa))
            else:
                self.faults["misaligned"] += 1
        moved = {swa for _, swa in agreed}
        self.map = {full: swa for full, swa in self.map.items() if swa not in moved}
        self.map.update(agreed)

    def _settable(self, full_slot: int, swa_slot: int) -> tuple[int, int] | None:
        full_pad, swa_pad = 0 <= full_slot < self.page, 0 <= swa_slot < self.page
        if full_pad and swa_pad:
            return None
        full, swa = full_slot // self.page, swa_slot // self.page
        if full not in self.full.held or swa not in self.swa.held:
            self.faults["out_of_range"] += 1
            return None
        if full_slot % self.page != swa_slot % self.page:
            self.faults["misaligned"] += 1
            return None
        return full, swa

    def clear_full_to_swa_mapping(self, full_slots: Iterable[int]) -> None:
        for page in self._pages(full_slots):
            if page not in self.full.held:
                self.faults["double_free"] += 1
            self.map.pop(page, None)

    # ---- window ---------------------------------------------------------------------------

    def free_out_of_window(
        self,
        req_to_token: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        evicted_lens: Sequence[int],
        *,
        insert_lens: Sequence[int] | None = None,
        active: Sequence[bool] | None = None,
        max_pages: int | None = None,
        stride: int = 1,
    ) -> list[int]:
        new_evicted, dead_slots = [], []
        for i, (row, done) in enumerate(zip(req_to_token, evicted_lens, strict=True)):
            goal = self._goal(seq_lens[i], None if insert_lens is None else insert_lens[i])
            if (active is not None and not active[i]) or self._bad_row(done, goal, row, stride):
                new_evicted.append(done)
                continue
            if max_pages is not None:
                goal = min(goal, done + max_pages * self.page)
            dead_slots += [row[token // stride] for token in range(done, goal, self.page)]
            new_evicted.append(max(done, goal))
        swa = []
        for page in self._pages(dead_slots):
            if page not in self.full.held:
                self.faults["double_free"] += 1
            elif page in self.map:
                swa.append(self.map.pop(page))
        self._release([], swa, later=self.group_open)
        return new_evicted

    def _goal(self, seq_len: int, insert_len: int | None) -> int:
        window = self.sizes.window
        assert window is not None, "no window in this configuration"
        shape = {"page": self.page, "window": window, "chunked": self.sizes.chunked}
        goal = frontier(seq_len, **shape)
        return goal if insert_len is None else min(goal, insert_frontier(insert_len, **shape))

    def _bad_row(self, done: int, goal: int, row: Sequence[int], stride: int) -> bool:
        too_long = goal > len(row) * stride and goal > done  # else there is nothing to free
        if done < 0 or too_long:
            self.faults["bad_length"] += 1
            self.unsure |= too_long and (done < 0 or done % self.page != 0)
            return True
        if done % self.page:
            self.faults["misaligned"] += 1
            return True
        return False

    def clear(self) -> None:
        fresh = Oracle(self.sizes)
        self.__dict__.update(fresh.__dict__)
