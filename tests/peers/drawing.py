"""Random programs that a correct caller of sglang's allocator could make, drawn beside the oracle.

What sglang's allocator asks of its callers is kept to: nothing is freed twice, `free_full` names
pages whose SWA side is gone, segments begin at a page boundary. `docs/differences-sglang.md` says
what happens otherwise, and lists the three things a correct caller could do that are left out too:

* writing on in a page whose SWA side was freed,
* an SWA tail that begins inside a page, or behind a prefix that ends inside one,
* naming padding in a free of full pages; at page 1, in any free.

Refusals are not left out: either pool runs short alone, often, as do both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from tests.oracle import Oracle, OracleGrant, Sizes
from tests.peers.calls import ROWS, Call, Row, Shape

_MOST_REQUESTS = 8
_WEIGHTS = {
    "extend": 24,
    "too_much": 3,
    "decode": 22,
    "tail": 8,
    "free": 10,
    "finish": 8,
    "leave_window": 14,
    "free_full": 6,
    "free_segment": 8,
    "free_swa_segment": 6,
    "free_full_segment": 4,
    "free_segments": 4,
    "group": 6,
    "swap": 3,
    "take_away": 3,
    "give_orphan": 5,
    "recover": 3,
    "clear": 0.2,
}


@dataclasses.dataclass(eq=False)
class Request:
    """Tokens `start` .. `start + len(slots) - 1` of a row; `start` is on a page boundary."""

    start: int
    slots: list[int]

    @property
    def length(self) -> int:
        return self.start + len(self.slots)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A call, and the slots that it must be granted: None for a refusal and for other calls."""

    call: Call
    slots: list[int] | None = None


class Writer:
    """Draws calls one after the other. Every draw moves the oracle on."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.page = shape.page
        self.rng = np.random.default_rng(seed)
        self.oracle = Oracle(Sizes(shape.full_tokens, shape.swa_tokens, shape.page))
        self.requests: list[Request] = []
        self.drawn: list[Drawn] = []
        paged_only = ("tail", "decode")
        kinds = [k for k in _WEIGHTS if shape.page > 1 or k not in paged_only]
        weights = np.array([_WEIGHTS[kind] for kind in kinds])
        self.kinds: list[Callable[[], None]] = [getattr(self, f"_{kind}") for kind in kinds]
        self.weights = weights / weights.sum()

    def draw(self, count: int) -> list[Drawn]:
        """The next `count` calls."""
        while len(self.drawn) < count:
            self.kinds[self.rng.choice(len(self.kinds), p=self.weights)]()
        now, self.drawn = self.drawn[:count], self.drawn[count:]
        return now

    # ---- small choices ----------------------------------------------------------------------

    def number(self, top: int) -> int:
        return int(self.rng.integers(0, top))

    def chance(self, one_in: int) -> bool:
        return self.number(one_in) == 0

    def _request(self) -> Request | None:
        return self.requests[self.number(len(self.requests))] if self.requests else None

    def _is_mapped(self, slot: int) -> bool:
        return slot // self.page in self.oracle.map

    def _can_grow(self, request: Request) -> bool:
        """Whether its last page is full, or may be written on in both pools."""
        return request.length % self.page == 0 or self._is_mapped(request.slots[-1])

    def _growing(self) -> list[Request]:
        picked = self.rng.permutation(len(self.requests)).tolist()
        old = [self.requests[i] for i in picked if self._can_grow(self.requests[i])]
        rows = []
        for request in old[: 1 + self.number(ROWS)]:
            new = self.chance(3) and len(self.requests) < _MOST_REQUESTS
            rows.append(Request(0, []) if new else request)
        return rows or [Request(0, [])]

    def _row(self, request: Request, grow: int, tail: int = 0) -> Row:
        last = request.slots[-1] if request.slots else -1
        return Row(request.length, request.length + grow, last, tail)

    # ---- grants -----------------------------------------------------------------------------

    def _extend(self, longest: int = 3) -> None:
        requests = self._growing()
        if self.page == 1:
            self._alloc(requests[0], self.number(2 * longest + 1))
            return
        grows = [self.number(longest * self.page + 1) for _ in requests]
        self._make_extend(requests, grows)

    def _too_much(self) -> None:
        """More than one of the pools has left, and at most what a call has room for."""
        left = self.oracle.available_size()
        want = min(self.shape.width, left + 1 + self.number(2 * self.page))
        request = self._growing()[0]
        if self.page == 1:
            self._alloc(request, want)
        else:
            self._make_extend([request], [want])

    def _alloc(self, request: Request, grow: int) -> None:
        grant = self.oracle.alloc(grow, capacity=self.shape.width)
        self._granted(Call("alloc", (Row(0, grow),)), grant, [request])

    def _make_extend(self, requests: list[Request], grows: list[int]) -> None:
        rows = [self._row(r, grow) for r, grow in zip(requests, grows, strict=True)]
        columns = ([getattr(r, field) for r in rows] for field in ("prefix", "seq", "last_loc"))
        grant = self.oracle.alloc_extend(*columns, capacity=self.shape.width)
        self._granted(Call("alloc_extend", tuple(rows)), grant, requests)

    def _tail(self) -> None:
        aligned = [r for r in self.requests if r.length % self.page == 0]
        request = aligned[self.number(len(aligned))] if aligned and self.chance(2) else None
        if request is None and len(self.requests) >= _MOST_REQUESTS:
            return
        request = request or Request(0, [])
        grow = 1 + self.number(5 * self.page)
        pages = -(-grow // self.page)
        skipped = self.number(pages + 1)  # pages before the tail
        row = self._row(request, grow, max(0, grow - skipped * self.page))
        columns = ([each] for each in dataclasses.astuple(row))
        grant = self.oracle.alloc_extend_swa_tail(*columns, capacity=self.shape.width)
        self._granted(Call("alloc_extend_swa_tail", (row,)), grant, [request])

    def _decode(self) -> None:
        requests = self._growing()
        rows = [self._row(request, 1) for request in requests]
        grant = self.oracle.alloc_decode([r.seq for r in rows], [r.last_loc for r in rows])
        self._granted(Call("alloc_decode", tuple(rows)), grant, requests)

    def _granted(self, call: Call, grant: OracleGrant, requests: list[Request]) -> None:
        slots = grant.slots[: grant.count]
        self.drawn.append(Drawn(call, slots if grant.ok else None))
        if not grant.ok:
            return
        for row, request in zip(call.rows, requests, strict=True):
            grow = row.seq - row.prefix
            if request not in self.requests and grow:
                self.requests.append(request)
            request.slots += slots[:grow]
            slots = slots[grow:]

    # ---- frees ------------------------------------------------------------------------------

    def _call(self, name: str, *lists: list[int], rows: tuple[Row, ...] = ()) -> None:
        method = name.removesuffix("s")
        method = {"free_full_segment": "free_full"}.get(method, method)
        getattr(self.oracle, method)(*lists)
        self.drawn.append(Drawn(Call(name, rows, *(tuple(each) for each in lists))))

    def _run_of(self, request: Request, mapped: bool | None) -> tuple[int, int]:
        """Places of whole pages at one end of a request: all with an SWA side, all without."""
        starts = list(range(0, len(request.slots), self.page))
        good = [mapped in (None, self._is_mapped(request.slots[s])) for s in starts]
        from_end = self.chance(2)
        count = 0
        for fits in reversed(good) if from_end else good:
            if not fits:
                break
            count += 1
        count = min(count, 1 + self.number(len(starts)))
        if not count:
            return 0, 0
        return (starts[-count], len(request.slots)) if from_end else (0, count * self.page)

    def _cut(self, request: Request, first: int, end: int) -> list[int]:
        """Takes the slots of places `first` .. `end` out, from one end of the request."""
        slots = request.slots[first:end]
        if first == 0:
            request.start += min(end, len(request.slots))
            del request.slots[:end]
        else:
            del request.slots[first:]
        if not request.slots:
            self.requests.remove(request)
        return slots

    def _oddly(self, slots: list[int], *, padding: bool = False) -> list[int]:
        """The same pages named in another way: any order, some twice, a few of their slots."""
        if self.chance(2):
            return slots
        slots = self.rng.permutation(slots).tolist()
        if self.page == 1:
            return slots
        if self.chance(2):
            slots = list({slot // self.page: slot for slot in slots}.values())
        room = self.shape.width - len(slots)
        odd = slots[: min(2, room - 1)] if room > 1 else []
        return [*slots, *odd, *([0] if padding and room > 3 else [])]

    def _free_part(self, name: str, mapped: bool | None) -> None:
        request = self._request()
        slots = [] if request is None else self._cut(request, *self._run_of(request, mapped))
        if slots:
            self._call(name, self._oddly(slots))

    def _free(self) -> None:
        self._free_part("free", None if self.page > 1 else True)

    def _free_full(self) -> None:
        self._free_part("free_full", mapped=False)

    def _segment(self, name: str, *, mapped: bool, count: int = 1) -> None:
        """Up to `count` runs of pages of one request, at its ends."""
        request = self._request()
        parts: list[tuple[Row, list[int]]] = []
        while request is not None and request.slots and len(parts) < count:
            start = request.start
            first, end = self._run_of(request, mapped)
            slots = self._cut(request, first, end)
            if not slots:
                break
            parts.append((Row(start + first, start + first + len(slots)), slots))
        parts.sort(key=lambda part: part[0].prefix)
        if parts:
            slots = [slot for _, part in parts for slot in part]
            self._call(name, slots, rows=tuple(row for row, _ in parts))

    def _free_segment(self) -> None:
        self._segment("free_segment", mapped=True)

    def _free_full_segment(self) -> None:
        self._segment("free_full_segment", mapped=False)

    def _free_segments(self) -> None:
        if self.chance(3):
            self._segment("free_full_segments", mapped=False, count=3)
        else:
            self._segment("free_segments", mapped=True, count=3)

    def _finish(self) -> None:
        """A whole request: what has no SWA side by `free_full`, the rest by `free`."""
        request = self._request()
        if request is None:
            return
        self.requests.remove(request)
        bare = [slot for slot in request.slots if not self._is_mapped(slot)]
        if bare:
            self._call("free_full", bare)
        rest = [slot for slot in request.slots if self._is_mapped(slot)]
        if rest:
            self._call("free", rest)

    def _leave_window(self) -> None:
        """SWA pages from the front on; at larger pages also some that are gone, and padding."""
        request = self._request()
        if request is None:
            return
        pages = self.number(-(-len(request.slots) // self.page) + 1)
        slots = request.slots[: pages * self.page]
        if self.page == 1 or self.chance(2):
            slots = [slot for slot in slots if self._is_mapped(slot)]
        if slots:
            self._call("free_swa", self._oddly(slots, padding=self.page > 1))

    def _free_swa_segment(self) -> None:
        request = self._request()
        if request is None:
            return
        first, end = self._run_of(request, mapped=True)
        if end:
            row = Row(request.start + first, request.start + end)
            self._call("free_swa_segment", request.slots[first:end], rows=(row,))

    def _group(self) -> None:
        self._call("free_group_end" if self.oracle.group_open else "free_group_begin")

    # ---- mapping ----------------------------------------------------------------------------

    def _slots_of(self, *pages: int) -> list[int]:
        return [page * self.page + i for page in pages for i in range(self.page)]

    def _swap(self) -> None:
        """Two full pages exchange their SWA pages."""
        mapped = sorted(self.oracle.map)
        if len(mapped) < 2:
            return
        one, other = self.rng.choice(mapped, 2, replace=False).tolist()
        sides = self._slots_of(self.oracle.map[other], self.oracle.map[one])
        self._call("set_full_to_swa_mapping", self._slots_of(one, other), sides)

    def _take_away(self) -> None:
        """A full page loses its SWA page, which stays held."""
        if self.oracle.map and len(self._orphans()) < 3:
            page = sorted(self.oracle.map)[self.number(len(self.oracle.map))]
            self._call("clear_full_to_swa_mapping", self._slots_of(page))

    def _give_orphan(self) -> None:
        """A held SWA page that nobody maps to gets a full page, as a cache that loads KV does."""
        orphans, held = self._orphans(), sorted(self.oracle.full.held)
        bare = [page for page in held if page not in self.oracle.map]
        homes = held if self.chance(4) else bare
        if orphans and homes:
            home = homes[self.number(len(homes))]
            orphan = orphans[self.number(len(orphans))]
            self._call("set_full_to_swa_mapping", self._slots_of(home), self._slots_of(orphan))

    def _recover(self) -> None:
        """A bare page takes over the SWA page of another, as a cache's tombstone does of a copy."""
        bare = sorted(self.oracle.full.held - set(self.oracle.map))
        if bare and self.oracle.map:
            kept = bare[self.number(len(bare))]
            copy = sorted(self.oracle.map)[self.number(len(self.oracle.map))]
            side = self._slots_of(self.oracle.map[copy])
            self._call("clear_full_to_swa_mapping", self._slots_of(copy))
            self._call("set_full_to_swa_mapping", self._slots_of(kept), side)

    def _orphans(self) -> list[int]:
        return sorted(self.oracle.swa.held - set(self.oracle.map.values()))

    def _clear(self) -> None:
        self.requests = []
        self._call("clear")
