"""A random walk over an allocator with one budget, every step of it compared with plain Python."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
from compare import free_queue, held_pages, pending_queue
from pair import compiled
from unified_oracle import Budget

import swa_jax as swa
from swa_jax.models.decoder import UnifiedKV
from swa_jax.models.model_config import FULL, SWA
from swa_jax.unified import UnifiedLayout

# `swa_jax.rebalance` is the function; this is its module.
rebalancing = importlib.import_module("swa_jax.rebalance")
WIDTH = 48
OPS = ("extend", "free", "free_swa", "stale", "group", "full_short", "swa_short", "rebalance")


def unified_config(blocks, block_units, full_units, swa_units, page=2, window=5):
    """A configuration of exactly these blocks."""
    layout = UnifiedLayout(blocks, block_units, full_units, swa_units, 8 * page)
    full, of_swa = blocks * layout.full_pages * page, blocks * layout.swa_pages * page
    return swa.PoolConfig(full, of_swa, page, window, unified_layout=layout)


class Walk:
    """The state, the oracle, and the requests that hold pages.

    `fresh`: what this file is about is compiled anew, so that a bug put into it counts.
    """

    def __init__(self, config, *, fresh=False):
        self.split, self.available = compiled("rebalance"), compiled("unified_available")
        if fresh:
            self.split = jax.jit(lambda *args: rebalancing._rebalance.__wrapped__(*args))
            self.available = jax.jit(lambda state: rebalancing.unified_available(state))
        self.config, self.layout = config, config.unified_layout
        self.state, self.budget = swa.init(config), Budget(config.unified_layout)
        self.requests, self.double_frees, self.open = [], 0, False
        self.units = {FULL: _unit_table(self.layout, FULL), SWA: _unit_table(self.layout, SWA)}
        self.verify()

    def step(self, op, x, y):
        """One call; x and y choose what it names."""
        getattr(self, op)(x, y)
        self.verify()

    def _call(self, name, *args, **static):
        return compiled(name)(self.state, *args, **static)

    def _slots(self, pages):
        slots = [page * self.config.page_size for page in sorted(pages)][:WIDTH]
        return jnp.asarray(np.array(slots + [0] * (WIDTH - len(slots)), np.int32))

    def extend(self, x, y):
        tokens = 1 + x % 12
        row = [jnp.array([value], jnp.int32) for value in (0, tokens, -1)]
        need = -(-tokens // self.config.page_size)
        self.state, grant = self._call("alloc_extend", *row, capacity=12)
        free = self.budget.full.free(), self.budget.swa.free()
        assert bool(grant.ok) == (need <= min(map(len, free)))
        assert int(grant.full_short) == max(need - len(free[0]), 0)
        assert int(grant.swa_short) == max(need - len(free[1]), 0)
        if not grant.ok:
            return
        pages = set((np.asarray(grant.slots)[:tokens] // self.config.page_size).tolist())
        of_swa = set(np.asarray(self.state.full_to_swa)[sorted(pages)].tolist())
        assert len(pages) == len(of_swa) == need
        assert pages <= free[0], "a page that was not the pool's to grant"
        assert of_swa <= free[1], "an SWA page that was not the pool's to grant"
        self.budget.full.held |= pages
        self.budget.swa.held |= of_swa
        self.requests.append(dict.fromkeys(pages))
        self.requests[-1].update({p: int(self.state.full_to_swa[p]) for p in pages})

    def _give_back(self, side, pages):
        side.held -= pages
        if self.open:
            side.pending |= pages

    def free(self, x, y):
        if not self.requests:
            return
        request = self.requests.pop(x % len(self.requests))
        self.state = self._call("free", self._slots(request))
        self._give_back(self.budget.full, set(request))
        self._give_back(self.budget.swa, {page for page in request.values() if page})

    def free_swa(self, x, y):
        if not self.requests:
            return
        request = self.requests[x % len(self.requests)]
        pages = [page for page in request if request[page]][: 1 + y % 4]
        self.state = self._call("free_swa", self._slots(pages))
        self._give_back(self.budget.swa, {request[page] for page in pages})
        request.update(dict.fromkeys(pages, 0))

    def stale(self, x, y):
        """Frees a page that nobody holds: free, pending or in a block of the other pool."""
        loose = sorted(set(range(1, self.config.full_pages + 1)) - self.budget.full.held)
        if loose:
            self.state = self._call("free", self._slots([loose[x % len(loose)]]))
            self.double_frees += 1

    def group(self, x, y):
        if self.open:
            self.state = self._call("free_group_end")
            self.budget.full.pending.clear()
            self.budget.swa.pending.clear()
        else:
            self.state = self._call("free_group_begin")
        self.open = not self.open

    def full_short(self, x, y):
        self.rebalance(len(self.budget.full.free()) + 1 + x % 7, y % 4)

    def swa_short(self, x, y):
        self.rebalance(x % 4, len(self.budget.swa.free()) + 1 + y % 7)

    def rebalance(self, x, y):
        before, budget = np.asarray(self.state.block_is_full), self.budget
        pending = [pending_queue(pool) for pool in (self.state.full, self.state.swa)]
        moves = budget.moves(x, y)
        self.state = self.split(self.state, jnp.int32(x), jnp.int32(y))
        after = np.asarray(self.state.block_is_full)
        to_full = set(np.flatnonzero(after & ~before).tolist())
        to_swa = set(np.flatnonzero(before & ~after).tolist())
        assert (len(to_full), len(to_swa)) == (max(moves, 0), max(-moves, 0))
        assert to_full <= budget.swa.free_blocks(), "a block that was in use"
        assert to_swa <= budget.full.free_blocks(), "a block that was in use"
        budget.full.blocks = (budget.full.blocks | to_full) - to_swa
        budget.swa.blocks = (budget.swa.blocks | to_swa) - to_full
        assert pending == [pending_queue(pool) for pool in (self.state.full, self.state.swa)]
        for pool, side in ((self.state.full, budget.full), (self.state.swa, budget.swa)):
            left = [
                len(side.pages((p - 1) // side.per_block) & side.free()) for p in free_queue(pool)
            ]
            assert left == sorted(left), "blocks in use come first, the fullest of all"

    def verify(self):
        """Everything that the oracle knows."""
        state, budget = self.state, self.budget
        if not all(map(bool, compiled("invariants")(state).values())):
            swa.check(state)
        assert set(np.flatnonzero(np.asarray(state.block_is_full)).tolist()) == budget.full.blocks
        for pool, side in ((state.full, budget.full), (state.swa, budget.swa)):
            assert sorted(free_queue(pool)) == sorted(side.free())
            assert set(pending_queue(pool)) == side.pending
            assert held_pages(pool) == side.held
        sizes = [int(size) // self.config.page_size for size in self.available(state)]
        assert sizes == [budget.reachable("full"), budget.reachable("swa")]
        faults = swa.faults(state)
        assert faults.pop("double_free") == self.double_frees
        assert not any(faults.values())
        self._nothing_overlaps()

    def _nothing_overlaps(self):
        """No unit is of two layers of held pages, nor of the padding."""
        units = []
        for kind, side in ((FULL, self.budget.full), (SWA, self.budget.swa)):
            units += self.units[kind][:, sorted(side.held)].reshape(-1).tolist()
        assert len(set(units)) == len(units)
        assert not units or min(units) >= self.layout.padding_units
        assert not units or max(units) < self.layout.units


def _unit_table(layout, kind):
    """int[layers, pages + 1] the unit of each layer of each page."""
    kv = UnifiedKV(jnp.zeros((layout.units, 1, 2, 1)), layout)
    layers, count = (
        (layout.full_units, layout.full_pages)
        if kind == FULL
        else (layout.swa_units, layout.swa_pages)
    )
    pages = jnp.arange(layout.blocks * count + 1, dtype=jnp.int32)
    return np.stack([np.asarray(kv.pages_of(kind, place, pages)) for place in range(layers)])


def long_walk(config, seed, steps, *, fresh=False):
    """A walk of so many steps."""
    rng, walk = np.random.default_rng(seed), Walk(config, fresh=fresh)
    for _ in range(steps):
        op = OPS[rng.integers(len(OPS))]
        walk.step(op, int(rng.integers(64)), int(rng.integers(64)))
    return walk
