"""The replay with a prefix cache as a host engine runs it: one Python loop over any `Store`.

The policy is that of `swa_jax.replay.shared_step`, step for step, so that totals can be compared:
leave windows, finish, match and admit, make room, grow, hand the computed chunk to the cache. What
concerns all rows is done on NumPy arrays; the rest by the row.
"""

import time
from dataclasses import dataclass

import numpy as np

from benchmarks.replay_store import Store
from swa_jax.config import PoolConfig

IDLE = -1


@dataclass(frozen=True)
class HostLoad:
    """The requests, in the order in which they are served."""

    prompt_lens: np.ndarray  # int64[N] tokens
    final_lens: np.ndarray  # int64[N] tokens whose KV exists at the end
    tokens: list[np.ndarray]  # int32[final_lens[i] + 1] or more of each


@dataclass
class Totals:
    """What a replay comes to."""

    steps: int = 0
    completed: int = 0
    retracted: int = 0
    recomputed: int = 0
    hit_tokens: int = 0
    peak_full: int = 0
    peak_swa: int = 0
    peak_running: int = 0
    seconds: float = 0.0
    hashed_s: float = 0.0  # spent on hashes before the clock ran


class HostReplay:
    """One run."""

    def __init__(
        self,
        config: PoolConfig,
        load: HostLoad,
        store: Store,
        *,
        max_running: int = 256,
        chunk_tokens: int = 8192,
    ) -> None:
        """Nothing runs; all requests wait."""
        assert config.sliding_window is not None
        self.config, self.load, self.store = config, load, store
        self.chunk, self.size, self.window = chunk_tokens, config.page_size, config.sliding_window
        rows = max_running
        self.request = np.full(rows, IDLE)
        self.length, self.prefill, self.evicted, self.final = (
            np.zeros(rows, np.int64) for _ in range(4)
        )
        self.waiting = list(range(len(load.prompt_lens) - 1, -1, -1))  # the next one last
        self.progress = load.prompt_lens.tolist()
        self.seen = [False] * len(self.progress)
        self.running = 0
        self.decoding, self.demand = np.zeros(0, np.int64), 0
        self.prefilling = IDLE  # the row whose prompt is not all computed: one at a time
        self.refused_at = IDLE
        self.totals = Totals()
        store.prepare(load.tokens, self.progress)
        self.totals.hashed_s = store.hashed_s

    def run(self, most_steps: int = 10**9) -> Totals:
        """Serves everything."""
        started = time.perf_counter()
        while (self.waiting or self.running) and self.totals.steps < most_steps:
            self.step()
        self.totals.seconds = time.perf_counter() - started
        return self.totals

    def busy(self) -> np.ndarray:
        """bool[R] rows that hold a request."""
        return self.request != IDLE

    def step(self) -> None:
        """One step."""
        self.leave()
        done = np.nonzero((self.length >= self.final) & self.busy())[0]
        for row in done.tolist():
            self.store.finish(row, int(self.length[row]), int(self.evicted[row]))
            self.vacate(row)
            self.totals.completed += 1
        self.admit()
        self.look()
        self.make_room()
        chunk = self.grow()
        self.count()
        if chunk:
            row = self.prefilling
            owned = self.store.take_over(row, int(self.length[row]), int(self.evicted[row]))
            self.evicted[row] = max(self.evicted[row], owned)
            if self.length[row] >= self.prefill[row]:
                self.prefilling = IDLE

    def leave(self) -> None:
        """Gives back every SWA page that has left its row's window."""
        edge = (self.length - self.window) // self.size * self.size
        rows = np.nonzero(edge > self.evicted)[0]  # idle rows have length 0
        if rows.size:
            self.store.leave(rows, self.evicted[rows], edge[rows])
            self.evicted[rows] = edge[rows]

    def vacate(self, row: int) -> None:
        """Makes a row idle."""
        self.request[row] = IDLE
        self.running -= 1
        self.length[row] = self.prefill[row] = self.evicted[row] = self.final[row] = 0
        if row == self.prefilling:
            self.prefilling = IDLE

    def admit(self) -> None:
        """Takes in the oldest waiting request, on top of what is cached of it, if it fits."""
        running = self.running
        # What did not fit fits no better before some request is done.
        again = self.totals.completed != self.refused_at or not running
        if not self.waiting or self.prefilling != IDLE or running == len(self.request) or not again:
            return
        request, row = self.waiting[-1], int(np.argmin(self.busy()))
        target = self.progress[request]
        cached = self.store.match(row, request, target)
        full = self.pages(target) - cached // self.size
        swa = min(self.pages(target), self.config.min_swa_pages, full)
        if running and not self.store.fits(full + running, swa + running):
            self.store.unmatch(row)
            self.refused_at = self.totals.completed
            return
        self.waiting.pop()
        self.refused_at = IDLE
        self.request[row], self.length[row], self.prefill[row] = request, cached, target
        self.evicted[row], self.final[row] = cached, self.load.final_lens[request]
        self.prefilling = row
        self.running += 1
        if not self.seen[request]:
            self.seen[request] = True
            self.totals.hit_tokens += min(cached, int(self.load.prompt_lens[request]))

    def pages(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // self.size)

    def look(self) -> None:
        """Finds the rows that decode, and the pages of each kind that they take."""
        mine = self.busy()
        if self.prefilling != IDLE:
            mine[self.prefilling] = False
        self.decoding = np.nonzero(mine)[0]
        self.demand = int(np.count_nonzero(self.length[self.decoding] % self.size == 0))

    def chunk_tokens(self, pages: int) -> int:
        """Tokens that the row in prefill adds with so many pages."""
        row = self.prefilling
        if row == IDLE:
            return 0
        length = int(self.length[row])
        room = -length % self.size + pages * self.size
        return min(self.chunk, int(self.prefill[row]) - length, room)

    def stuck(self) -> bool:
        """The decoding rows cannot all go on, or no row at all can."""
        left = self.store.room() - self.demand
        return left < 0 or (not self.decoding.size and self.chunk_tokens(left) == 0)

    def make_room(self) -> None:
        """Evicts; then gives up locks that are not needed any more; then retracts the newest."""
        self.evict_short()
        if not (self.running and self.stuck()):
            return
        for row in np.nonzero(self.busy())[0].tolist():
            edge = max(int(self.length[row]) - self.window, 0) // self.size * self.size
            self.store.release_passed(row, edge)
        self.evict_short()
        while self.running > 1 and self.stuck():
            self.retract(int(np.argmax(self.request)))
            self.look()
            self.evict_short()

    def evict_short(self) -> None:
        """Evicts what the step lacks."""
        self.store.make_room(self.demand + self.chunk_pages())

    def chunk_pages(self) -> int:
        """Pages that the row in prefill takes if it can have them."""
        row = self.prefilling
        if row == IDLE:
            return 0
        length = int(self.length[row])
        after = min(length + self.chunk, int(self.prefill[row]))
        return self.pages(after) - self.pages(length)

    def retract(self, row: int) -> None:
        """Sends a row's request back to the queue."""
        request, length = int(self.request[row]), int(self.length[row])
        self.store.retract(row, length, int(self.evicted[row]))
        self.progress[request] = max(self.progress[request], length)
        self.waiting.append(request)  # it is the newest, so it is next
        self.totals.retracted += 1
        self.totals.recomputed += length
        self.vacate(row)

    def grow(self) -> int:
        """A token for every decoding row, a chunk for the row in prefill; tokens of the chunk."""
        rows = self.decoding
        chunk = self.chunk_tokens(max(self.store.room() - self.demand, 0))
        if chunk:
            row = self.prefilling
            self.store.prefill(row, int(self.length[row]), chunk)
            self.length[row] += chunk
        if rows.size:
            self.store.decode(rows, self.length[rows])
            self.length[rows] += 1
        return chunk

    def count(self) -> None:
        """Brings the totals up to date."""
        totals = self.totals
        full, swa = self.store.held()
        totals.steps += 1
        totals.peak_full, totals.peak_swa = max(totals.peak_full, full), max(totals.peak_swa, swa)
        totals.peak_running = max(totals.peak_running, self.running)
