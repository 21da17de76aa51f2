"""vLLM's `KVCacheManager` as a store of the host replay.

Both kinds of page come from one pool of as many blocks as the two pools have pages. Matching,
caching, leaving windows and evicting are all done by `allocate_slots`, request by request, as
vLLM's scheduler calls it. Prompts are hashed before the clock runs (an engine does so on arrival);
what is generated is hashed as it comes.
"""

import time

import numpy as np

from benchmarks.vllm_classes import load_vllm
from swa_jax.bench.side import Native
from swa_jax.config import PoolConfig


class VllmStore:
    """One manager, one vLLM request for each of the trace."""

    name = "vLLM"
    hashed_s = 0.0

    def __init__(self, config: PoolConfig, rows: int, longest: int) -> None:
        """All free."""
        self.classes = load_vllm()
        self.size = config.page_size
        self.blocks = config.full_pages + config.swa_pages
        self.manager = self.classes.new_manager(
            self.blocks, config.page_size, config.sliding_window, max_tokens=longest
        )
        self.pool = self.manager.block_pool
        self.requests: list[Native] = []
        self.tokens: list[list[int]] = []
        self.rows: list[Native] = [None] * rows
        self.matched: Native = None  # blocks and tokens of the row that has just been matched
        self.promised = 0  # of these blocks those that are still among the free ones

    def prepare(self, tokens: list[np.ndarray], prompts: list[int]) -> None:
        """Lists, and requests with the hashes of their prompts."""
        self.tokens = [each.tolist() for each in tokens]
        started = time.perf_counter()
        self.requests = [
            self.classes.new_request(str(index), each[:prompt], self.size)
            for index, (each, prompt) in enumerate(zip(self.tokens, prompts, strict=True))
        ]
        self.hashed_s = time.perf_counter() - started

    def match(self, row: int, request: int, length: int) -> int:
        """See `Store`."""
        del length  # the request knows it
        found = self.requests[request]
        blocks, tokens = self.manager.get_computed_blocks(found)
        self.rows[row] = found
        self.matched = blocks, tokens
        found_blocks = [block for group in blocks.blocks for block in group]
        self.promised = sum(not (block.ref_cnt or block.is_null) for block in found_blocks)
        return tokens

    def unmatch(self, row: int) -> None:
        """Nothing was taken yet."""
        self.rows[row] = self.matched = None
        self.promised = 0

    def free_blocks(self) -> int:
        """Blocks that can be granted, cached or not."""
        return self.pool.get_num_free_blocks() - self.promised

    def fits(self, full_pages: int, swa_pages: int) -> bool:
        """One pool for both."""
        return full_pages + swa_pages <= self.free_blocks()

    def room(self) -> int:
        """A page of each kind is two blocks."""
        return self.free_blocks() // 2

    def make_room(self, pages: int) -> None:
        """Free blocks are cached ones, the oldest granted first."""

    def held(self) -> tuple[int, int]:
        """All blocks in use, whatever for; cached ones are free."""
        return self.blocks - self.pool.get_num_free_blocks(), 0

    def decode(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """A call for each row, as in vLLM's scheduler."""
        allocate = self.manager.allocate_slots
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            request = self.rows[row]
            if length == request.num_tokens:
                token = self.tokens[int(request.request_id)][length]
                request.append_output_token_ids(token)
            granted = allocate(request, 1)
            assert granted is not None
            granted.get_block_ids(allow_none=True)
            request.num_computed_tokens = length + 1

    def prefill(self, row: int, length: int, tokens: int) -> None:
        """See `Store`."""
        request = self.rows[row]
        if self.matched is None:
            granted = self.manager.allocate_slots(request, tokens)
        else:
            blocks, cached = self.matched
            granted = self.manager.allocate_slots(request, tokens, cached, blocks)
            self.matched, self.promised = None, 0
        assert granted is not None
        granted.get_block_ids()
        request.num_computed_tokens = length + tokens

    def leave(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """`allocate_slots` does it."""

    def take_over(self, row: int, length: int, evicted: int) -> int:
        """`allocate_slots` has done it; all blocks are the pool's, cached or not."""
        del row, length
        return evicted

    def finish(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        self.retract(row, length, evicted)

    def retract(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        del length, evicted
        request = self.rows[row]
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.rows[row] = None

    def release_passed(self, row: int, frontier: int) -> None:
        """Nothing is held that the row has left behind."""
