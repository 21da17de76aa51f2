"""Levanter's `PageTable`, jitted JAX, as its inference engine calls it.

It has one pool, no window, and a table of sequences, which is made as large as the work asks for.
Only `levanter/inference/page_table.py` and what that imports is loaded: the package's own
`__init__` would import its trainer. Needs haliax and equinox.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.bench.side import ByRequest, Maker, Native
from swa_jax.bench.workload import Point

DIFFERS = (
    "one pool and no window, so it allocates half as many pages; frees sequences, not slots; does "
    "not donate when it allocates; looks for each free page in the whole pool, so it is left out "
    "where that is more than a second's work"
)
_MOST_LOOKED_AT = 2**29  # pages of one extend times pages of the pool
_PACKAGES = ("levanter", "levanter.inference")


def load() -> Maker:
    """Imports the page table.

    Raises:
      ImportError: it, haliax or equinox is not there.
    """
    haliax = importlib.import_module("haliax")
    with _bare_packages():
        table = importlib.import_module("levanter.inference.page_table").PageTable
    return lambda point: LevanterSide(haliax, table, point)


def reaches(point: Point) -> bool:
    """Whether an extend takes it no more than about a second."""
    pages = point.slots // point.page_size
    return pages * (point.pool_tokens // point.page_size) <= _MOST_LOOKED_AT


@contextlib.contextmanager
def _bare_packages() -> Iterator[None]:
    """Levanter's packages without what their `__init__` does, during an import."""
    spec = importlib.util.find_spec("levanter")
    places = None if spec is None else spec.submodule_search_locations
    if not places:
        raise ImportError("not installed: levanter")
    before = {name: sys.modules.get(name) for name in _PACKAGES}
    for name in _PACKAGES:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [f"{next(iter(places))}{name.removeprefix('levanter').replace('.', '/')}"]
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Tokens to allocate: the sequence of each, and its place there."""

    sequences: Native  # int32[position]
    positions: Native  # int32[position]


class LevanterSide(ByRequest):
    """Pages are counted from 1 here, from 0 there."""

    name = "Levanter"
    lacks = ByRequest.lacks | {"free_swa_segment", "shuffle"}

    def __init__(self, haliax: Native, table: Native, point: Point) -> None:
        """Makes a table for as many sequences as the point has rows."""
        self._hax, self._size = haliax, point.page_size
        longest = max(point.row_tokens, 2 * point.page_size + 256)  # 256 of them decoded
        self._sequences = max(point.batch, point.rows)
        self.last_page = point.pool_tokens // point.page_size
        self._table = table.init(
            self.last_page, self._sequences, point.page_size, -(-longest // point.page_size)
        )

    def numpy(self, values: jax.Array) -> np.ndarray:
        """int64[N] slots."""
        return np.asarray(values).astype(np.int64) + self._size

    def fresh_rows(self, lens: np.ndarray) -> tuple[_Rows, ...]:
        """The tokens, sequence by sequence."""
        sequences = np.repeat(np.arange(lens.size), lens)
        positions = np.concatenate([np.arange(tokens) for tokens in lens])
        return (_Rows(self._named(sequences), self._named(positions)),)

    def decode_rows(self, seq_lens: np.ndarray) -> _Rows:
        """A token for each sequence."""
        return _Rows(self._named(np.arange(seq_lens.size)), self._named(seq_lens - 1))

    def _named(self, values: np.ndarray) -> Native:
        return self._hax.named(jnp.asarray(values, jnp.int32), "position")

    def last_of(self, granted: jax.Array, places: np.ndarray) -> None:
        """The table knows."""
        del granted, places

    def available(self) -> tuple[int, int]:
        """Tokens of free pages, as if both sides had them."""
        free = int(np.sum(np.asarray(self._table.page_ref_counts.array) == 0)) * self._size
        return free, free

    def extend(self, rows: tuple[_Rows, ...], num_tokens: int) -> jax.Array:
        """Slots of new sequences; that their places in the table are taken costs it nothing."""
        del num_tokens
        taken = self._hax.ones({"seq": self._sequences}, dtype=bool)
        self._table = dataclasses.replace(self._table, used_mask=taken)
        return self._allocate(rows[0])

    def decode(self, seq_lens: _Rows, last: None) -> jax.Array:
        """One slot a sequence."""
        del last
        return self._allocate(seq_lens)

    def _allocate(self, rows: _Rows) -> jax.Array:
        self._table, batch = self._table.allocate_for_seq(rows.sequences, rows.positions)
        jax.block_until_ready(self._table)
        return jax.block_until_ready(batch.new_token_dests.array)

    def free_segment(self, slots: jax.Array) -> None:
        """Frees all sequences."""
        del slots
        everyone = jnp.ones(self._sequences, bool)
        self._table = jax.block_until_ready(self._table.free_pages_for_finished(everyone))

    def free_swa_segment(self, slots: jax.Array) -> None:
        """Has no counterpart."""
        raise NotImplementedError

    def give_back(self, heads: np.ndarray) -> None:
        """Frees all sequences: it never holds more than one batch."""
        self.free_segment(jnp.asarray(heads))
