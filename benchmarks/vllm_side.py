"""vLLM's v1 `KVCacheManager` and its `BlockPool` alone, prefix cache off: plain Python.

The manager allocates and frees by request, one call each, and gives lists of blocks; slots are
computed by vLLM's model runner. Both groups of layers, full and sliding window, draw on one pool of
blocks, which has as many as our two pools have pages. The pool alone takes and gives blocks,
however many at once, and does not know whose they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks.vllm_classes import load_vllm
from swa_jax.bench.side import ByRequest, Maker, Native, granted, slots_of
from swa_jax.bench.workload import Point

DIFFERS = (
    "a call for every request; frees requests, not slots; gives blocks, no slots; one pool for "
    "both groups, so there is no map between two"
)

POOL_DIFFERS = "takes and gives blocks, for nobody: who holds which is not kept; no decode"
_WINDOW = 2**30  # tokens; nothing leaves it but in `free_swa_segment`


def load() -> Maker:
    """Imports vLLM's core files.

    Raises:
      ImportError: they are not there, or are not as expected.
    """
    classes = load_vllm()

    def make(point: Point) -> "VllmSide":
        blocks = 2 * point.pool_tokens // point.page_size
        manager = classes.new_manager(
            blocks, point.page_size, _WINDOW, max_tokens=_WINDOW, caching=False
        )
        return VllmSide(manager, point)

    return make


def pool_reaches(point: Point) -> bool:
    """Blocks are objects: the manager's are enough where there are millions of them."""
    return 2 * point.pool_tokens // point.page_size <= 2**20


def load_pool() -> Maker:
    """Imports vLLM's core files.

    Raises:
      ImportError: they are not there, or are not as expected.
    """
    classes = load_vllm()

    def make(point: Point) -> "VllmPoolSide":
        return VllmPoolSide(classes.new_pool(2 * point.pool_tokens // point.page_size), point)

    return make


@dataclass
class _Request:
    """All that the manager reads of a request while the prefix cache is off."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int


@dataclass(frozen=True)
class _Granted:
    """Tokens `starts` to `ends` of these requests."""

    requests: list[_Request]
    starts: list[int]
    ends: list[int]


class VllmSide(ByRequest):
    """One call for every request."""

    name = "vLLM"

    def __init__(self, manager: Native, point: Point) -> None:
        """Drives this manager."""
        self._manager, self._size, self._tokens = manager, point.page_size, point.pool_tokens
        self._blocks = [group.req_to_blocks for group in manager.coordinator.single_type_managers]
        self._live: dict[str, _Request] = {}
        self._names = count()
        self.last_page = 2 * point.pool_tokens // point.page_size

    def numpy(self, values: _Granted) -> np.ndarray:
        """Slots in the full group's blocks."""
        each = [
            slots_of(self._pages(request), start, end, self._size)
            for request, start, end in zip(values.requests, values.starts, values.ends, strict=True)
        ]
        return np.concatenate(each)

    def _pages(self, request: _Request) -> list[int]:
        return [block.block_id for block in self._blocks[0][request.request_id]]

    def fresh_rows(self, lens: np.ndarray) -> tuple[list[int], ...]:
        """The lengths."""
        return (lens.tolist(),)

    def decode_rows(self, seq_lens: np.ndarray) -> list[int]:
        """The lengths."""
        return seq_lens.tolist()

    def last_of(self, granted: _Granted, places: np.ndarray) -> _Granted:
        """The requests."""
        del places
        return granted

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted if the pool were two of equal size: full, SWA."""
        held = [
            sum(not block.is_null for blocks in group.values() for block in blocks)
            for group in self._blocks
        ]
        if sum(held) + self._manager.block_pool.get_num_free_blocks() != self.last_page:
            raise RuntimeError("vLLM's pool and its requests disagree about who holds what")
        full, swa = (self._tokens - self._size * blocks for blocks in held)
        return full, swa

    def extend(self, rows: tuple[list[int], ...], num_tokens: int) -> _Granted:
        """Blocks for new requests."""
        requests = [_Request(str(next(self._names)), 0, tokens) for tokens in rows[0]]
        for request in requests:
            granted(self._manager.allocate_slots(request, request.num_tokens))
            self._live[request.request_id] = request
        return _Granted(requests, [0] * len(requests), rows[0])

    def decode(self, seq_lens: list[int], last: _Granted) -> _Granted:
        """One token more for each request."""
        allocate = self._manager.allocate_slots
        for request, tokens in zip(last.requests, seq_lens, strict=True):
            request.num_computed_tokens = tokens - 1
            granted(allocate(request, 1))
        return _Granted(last.requests, [tokens - 1 for tokens in seq_lens], seq_lens)

    def free_segment(self, slots: _Granted) -> None:
        """Frees the requests."""
        self._free(slots.requests)

    def _free(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            self._manager.free(request)
            del self._live[request.request_id]

    def free_swa_segment(self, slots: _Granted) -> None:
        """All tokens leave the window."""
        passed = self._manager.coordinator.remove_skipped_blocks
        for request in slots.requests:
            passed(request.request_id, request.num_tokens + _WINDOW)

    def give_back(self, heads: np.ndarray) -> None:
        """Frees the requests in the order in which a page of theirs is named."""
        owner = {
            page: request.request_id
            for request in self._live.values()
            for page in self._pages(request)
        }
        named = dict.fromkeys(owner[page] for page in (heads // self._size).tolist())
        self._free([self._live[name] for name in named])


@dataclass(frozen=True)
class _Blocks:
    """Of a batch, row by row: one for each page, on either side."""

    full: list[Native]
    swa: list[Native]


class VllmPoolSide(ByRequest):
    """Two calls for a batch: a block for each page of either side."""

    name = "vLLM, pool"
    lacks = ByRequest.lacks | {"decode"}

    def __init__(self, pool: Native, point: Point) -> None:
        """Drives this pool."""
        self._pool, self._size, self._tokens = pool, point.page_size, point.pool_tokens
        self._held = [0, 0]  # full, SWA: the pool itself does not tell them apart
        self._live: dict[int, tuple[Native, Native]] = {}  # by the full block's id
        self.last_page = 2 * point.pool_tokens // point.page_size

    def numpy(self, values: _Blocks) -> np.ndarray:
        """Slots of whole blocks; what is granted is given back by them, too."""
        pairs = zip(values.full, values.swa, strict=True)
        self._live.update((full.block_id, (full, swa)) for full, swa in pairs)
        pages = [block.block_id for block in values.full]
        return slots_of(pages, 0, len(pages) * self._size, self._size)

    def fresh_rows(self, lens: np.ndarray) -> tuple[int]:
        """The pages."""
        return (int(np.sum(-(-lens // self._size))),)

    def decode_rows(self, seq_lens: np.ndarray) -> None:
        """Has no counterpart."""

    def last_of(self, granted: _Blocks, places: np.ndarray) -> None:
        """Has no counterpart."""
        raise NotImplementedError

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted if the pool were two of equal size: full, SWA."""
        if sum(self._held) + self._pool.get_num_free_blocks() != self.last_page:
            raise RuntimeError("vLLM's pool has lost or found blocks")
        full, swa = (self._tokens - self._size * blocks for blocks in self._held)
        return full, swa

    def extend(self, rows: tuple[int], num_tokens: int) -> _Blocks:
        """Blocks for new requests."""
        del num_tokens
        (pages,) = rows
        take = self._pool.get_new_blocks
        blocks = _Blocks(take(pages), take(pages))
        self._held = [self._held[0] + pages, self._held[1] + pages]
        return blocks

    def decode(self, seq_lens: Native, last: Native) -> Native:
        """Has no counterpart."""
        raise NotImplementedError

    def free_segment(self, slots: _Blocks) -> None:
        """Frees both sides' blocks, or the full side's where the other is gone."""
        gone = self._held[1] == 0
        self._pool.free_blocks(slots.full if gone else slots.full + slots.swa)
        self._held = [self._held[0] - len(slots.full), max(0, self._held[1] - len(slots.swa))]

    def free_swa_segment(self, slots: _Blocks) -> None:
        """Frees the SWA side's blocks."""
        self._pool.free_blocks(slots.swa)
        self._held[1] -= len(slots.swa)

    def give_back(self, heads: np.ndarray) -> None:
        """Frees the blocks with these ids, and their fellows of the SWA side that are held."""
        pairs = [self._live.pop(page) for page in (heads // self._size).tolist()]
        full = [pair[0] for pair in pairs]
        swa = [pair[1] for pair in pairs] if self._held[1] else []
        self.free_segment(_Blocks(full, swa))
