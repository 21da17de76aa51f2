"""A minimal serving engine against sglang-jax's interface, on swa_jax or on sglang-jax itself.

    python examples/engine_step.py --stack ours
    python examples/engine_step.py --stack theirs     # needs sgl_jax from its repository

Both print the same. With `--full-tokens 256 --swa-tokens 160` they do not: SWA pages then leave the
cache while requests still read the full pages beside them, and what sglang-jax does when such pages
get their SWA side back is entry 19 of docs/differences-sglang.md.

The engine below is one program; only `load_stack` knows where the classes come from. What is served
are chats over a few shared openings, by a toy model: the KV of a token is a number that stands for
the whole text up to it, and the next token is computed from the KV that the request's slots name,
in the full pool for all of the text and in the SWA pool for the window. A slot that is somebody
else's, or was given away too early, shows as a wrong token.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

PAGE, WINDOW = 4, 8
ROWS, LONGEST = 6, 128
VOCABULARY = 97
Foreign: TypeAlias = Any  # of either stack
_COUNTED = (
    "refused",
    "steps",
    "hit_tokens",
    "prompt_tokens",
    "retractions",
    "evicted_full_tokens",
    "evicted_swa_tokens",
)
_OURS = "swa_jax.compat.sgl_jax"
_THEIRS = "sgl_jax.srt.mem_cache"


def load_stack(name: str) -> SimpleNamespace:
    """The classes of one stack, and a KV pool that its allocator takes."""
    if name == "ours":
        module = import_module(_OURS)
        kv_pool = SimpleNamespace(full_kv_pool=None, swa_kv_pool=None)
        return SimpleNamespace(**{each: getattr(module, each) for each in _NAMES}, kv_pool=kv_pool)
    found = {
        each: getattr(import_module(f"{_THEIRS}.{home}"), each) for each, home in _NAMES.items()
    }
    pool = import_module(f"{_THEIRS}.memory_pool").SWAKVPool
    kv_pool = object.__new__(pool)  # without buffers: the toy model keeps its own
    kv_pool.full_kv_pool = kv_pool.swa_kv_pool = None
    return SimpleNamespace(**found, kv_pool=kv_pool)


_NAMES = {
    "SWATokenToKVPoolAllocator": "allocator",
    "SWARadixCache": "swa_radix_cache",
    "RadixKey": "radix_cache",
    "MatchPrefixParams": "base_prefix_cache",
    "EvictParams": "base_prefix_cache",
    "DecLockRefParams": "base_prefix_cache",
}


class ReqToTokenPool:
    """The slots of every running request, a row each."""

    def __init__(self, rows: int, longest: int) -> None:
        """All rows are free."""
        self.req_to_token = np.zeros((rows, longest), np.int32)
        self.free_rows = list(range(rows))

    def write(self, indices: tuple[int, slice], values: np.ndarray) -> None:
        """Writes a piece of a row."""
        self.req_to_token[indices] = values


@dataclass(eq=False)
class Request:
    """A request, with the fields that the prefix cache reads and writes."""

    origin_input_ids: list[int]
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    extra_key: str | None = None
    dp_rank: int | None = None
    req_pool_idx: int = -1
    prefix_indices: Foreign = ()
    last_node: Foreign = None
    swa_uuid_for_lock: int | None = None
    last_matched_prefix_len: int = 0
    cache_protected_len: int = 0
    swa_evicted_seqlen: int = 0
    kv_committed_len: int = 0

    def pop_committed_kv_cache(self) -> int:
        """Tokens whose KV the request holds."""
        return self.kv_committed_len

    @property
    def tokens(self) -> list[int]:
        """The text so far."""
        return self.origin_input_ids + self.output_ids


class ToyModel:
    """KV is a number for the text up to a token; slots are looked up as attention would."""

    def __init__(self, allocator: Foreign) -> None:
        """Empty KV for both kinds of layer."""
        self.allocator = allocator
        self.full_kv = np.zeros(allocator.size_full + PAGE, np.int64)
        self.swa_kv = np.zeros(allocator.size_swa + PAGE, np.int64)

    def run(self, tokens: list[int], slots: np.ndarray, done: int) -> int:
        """Writes KV of `tokens[done:]`, and computes the next token from what the slots name."""
        kv = text_numbers(tokens)
        to_swa = np.asarray(self.allocator.full_to_swa_index_mapping)
        self.full_kv[slots[done:]] = kv[done:]
        self.swa_kv[to_swa[slots[done:]]] = kv[done:]
        window = slots[-WINDOW:]
        return next_token(self.full_kv[slots], self.swa_kv[to_swa[window]])


def text_numbers(tokens: list[int]) -> np.ndarray:
    """int64[T] a number for each beginning of the text."""
    numbers, number = [], 7
    for token in tokens:
        number = (number * 1_000_003 + token + 1) % 2_147_483_647
        numbers.append(number)
    return np.array(numbers, np.int64)


def next_token(full_kv: np.ndarray, window_kv: np.ndarray) -> int:
    """The toy's layers: one that sees all of the text, one that sees the window."""
    return int((full_kv.sum() + 31 * window_kv.sum()) % VOCABULARY)


def right_answer(request: Request) -> list[int]:
    """What the model says when every slot is right."""
    tokens = list(request.origin_input_ids)
    for _ in range(request.max_new_tokens):
        kv = text_numbers(tokens)
        tokens.append(next_token(kv, kv[-WINDOW:]))
    return tokens[len(request.origin_input_ids) :]


class Engine:
    """Steps: admit and prefill, decode, leave the window, finish."""

    def __init__(self, stack: SimpleNamespace, full_tokens: int, swa_tokens: int) -> None:
        """An engine with empty pools of so many slots."""
        self.stack = stack
        self.allocator = stack.SWATokenToKVPoolAllocator(
            full_tokens, swa_tokens, stack.kv_pool, page_size=PAGE
        )
        self.table = ReqToTokenPool(ROWS, LONGEST)
        self.cache = stack.SWARadixCache(self.table, self.allocator, WINDOW, PAGE)
        self.model = ToyModel(self.allocator)
        # Whole pages: sizes are what was asked for, and may have a rest.
        self.pages = [size() // PAGE for size in self._available]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.seen: dict[str, int] = dict.fromkeys(_COUNTED, 0)

    @property
    def _available(self) -> tuple[Callable[[], int], Callable[[], int]]:
        return self.allocator.full_available_size, self.allocator.swa_available_size

    def submit(self, request: Request) -> bool:
        """Queues a request; False for one that would not fit even if it were alone."""
        held = len(request.origin_input_ids) + request.max_new_tokens - 1  # the last has no KV
        fits = held <= LONGEST and -(-held // PAGE) <= min(self.pages)
        if fits:
            self.waiting.append(request)
        else:
            self.seen["refused"] += 1
        return fits

    def step(self) -> list[Request]:
        """One step of all requests; returns those that are finished."""
        self.seen["steps"] += 1
        while self.waiting and self.table.free_rows and self.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        self.decode()
        for request in self.running:
            self.cache.evict_req_swa(request, request.kv_committed_len)
        done = [each for each in self.running if len(each.output_ids) >= each.max_new_tokens]
        for request in done:
            self.leave(request)
        return done

    def make_room(self, tokens: int) -> bool:
        """Whether both pools have room for so many tokens, after evicting what is lacking."""
        full = max(0, tokens - self.allocator.full_available_size())
        of_swa = max(0, tokens - self.allocator.swa_available_size())
        if full or of_swa:
            self.evict(full, of_swa)
        return self.allocator.available_size() >= tokens

    def evict(self, full: int, of_swa: int) -> None:
        """Takes unlocked pages of the cache."""
        gone = self.cache.evict(self.stack.EvictParams(num_tokens=full, swa_num_tokens=of_swa))
        self.seen["evicted_full_tokens"] += gone.num_tokens_evicted
        self.seen["evicted_swa_tokens"] += gone.swa_num_tokens_evicted

    def admit(self, request: Request) -> bool:
        """Matches, locks, grants what the cache lacks, prefills; False where it does not fit."""
        tokens = request.tokens
        key = self.stack.RadixKey(tokens[:-1], request.extra_key, request.dp_rank)
        match = self.cache.match_prefix(self.stack.MatchPrefixParams(key=key))
        node, prefix = match.last_device_node, np.asarray(match.device_indices, np.int32)
        lock = self.cache.inc_lock_ref(node).swa_uuid_for_lock
        new, last = len(tokens) - len(prefix), int(prefix[-1]) if len(prefix) else -1
        slots = None
        if self.make_room(-(-new // PAGE) * PAGE):
            slots = self.allocator.alloc_extend([len(prefix)], [len(tokens)], [last], new)
        if slots is None:
            self.cache.dec_lock_ref(node, self.stack.DecLockRefParams(swa_uuid_for_lock=lock))
            return False
        request.req_pool_idx = self.table.free_rows.pop(0)
        request.prefix_indices, request.last_node, request.swa_uuid_for_lock = prefix, node, lock
        request.last_matched_prefix_len = request.cache_protected_len = len(prefix)
        request.fill_ids, request.swa_evicted_seqlen = tokens, 0
        row = np.concatenate([prefix, np.asarray(slots, np.int32)])
        self.table.write((request.req_pool_idx, slice(0, len(row))), row)
        self.compute(request, len(prefix))
        self.cache.cache_unfinished_req(request)
        self.seen["hit_tokens"] += len(prefix)
        self.seen["prompt_tokens"] += len(tokens)
        return True

    def compute(self, request: Request, done: int) -> None:
        """Runs the model on what has no KV yet, and takes its next token."""
        tokens = request.tokens
        slots = self.table.req_to_token[request.req_pool_idx, : len(tokens)]
        request.kv_committed_len = len(tokens)
        request.output_ids.append(self.model.run(tokens, slots, done))

    def decode(self) -> None:
        """One token for every request that wants more; the newest wait again where it is tight."""
        while rows := [each for each in self.running if len(each.output_ids) < each.max_new_tokens]:
            new_pages = sum(each.kv_committed_len % PAGE == 0 for each in rows)
            if self.make_room(new_pages * PAGE):
                break
            self.retract(rows[-1])
        if not rows:
            return
        lens = [each.kv_committed_len + 1 for each in rows]
        table = self.table.req_to_token
        last = [int(table[r.req_pool_idx, n - 2]) for r, n in zip(rows, lens, strict=True)]
        slots = self.allocator.alloc_decode(lens, last)
        for request, length, slot in zip(rows, lens, np.asarray(slots), strict=True):
            self.table.write((request.req_pool_idx, slice(length - 1, length)), slot)
            self.compute(request, length - 1)

    def retract(self, request: Request) -> None:
        """Gives a request's memory back; it will be prefilled again, with what it has said."""
        self.leave(request, is_insert=False)
        self.waiting.appendleft(request)
        self.seen["retractions"] += 1

    def leave(self, request: Request, *, is_insert: bool = True) -> None:
        """Hands the KV to the cache, or back to the pools, and the row to the next request."""
        self.cache.cache_finished_req(request, is_insert)
        self.table.free_rows.append(request.req_pool_idx)
        self.running.remove(request)

    def leaked(self) -> int:
        """Tokens of either pool that are not free although nobody needs any."""
        pools = self.allocator
        self.evict(pools.size_full, pools.size_swa)
        free = sum(int(size()) for size in self._available)
        return sum(self.pages) * PAGE - free


def chats(count: int, seed: int) -> Iterator[Request]:
    """Requests that begin with one of three openings, of different lengths."""
    rng = np.random.default_rng(seed)
    openings = [rng.integers(0, VOCABULARY, n).tolist() for n in (12, 20, 32)]
    for _ in range(count):
        prompt = (
            openings[rng.integers(3)] + rng.integers(0, VOCABULARY, rng.integers(1, 24)).tolist()
        )
        yield Request(prompt, max_new_tokens=int(rng.integers(1, 32)))


def serve(
    stack: str,
    requests: int = 40,
    seed: int = 0,
    full_tokens: int = 512,
    swa_tokens: int = 512,
) -> dict[str, int]:
    """Serves chats to the end, and counts what happened."""
    engine = Engine(load_stack(stack), full_tokens, swa_tokens)
    for request in chats(requests, seed):
        engine.submit(request)
    done: list[Request] = []
    while engine.waiting or engine.running:
        done += engine.step()
    wrong = sum(request.output_ids != right_answer(request) for request in done)
    seen = {"completed": len(done), **engine.seen, "wrong_answers": wrong}
    return {**seen, "leaked_tokens": engine.leaked()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A minimal engine on swa_jax or on sglang-jax.")
    parser.add_argument("--stack", choices=("ours", "theirs"), default="ours")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full-tokens", type=int, default=512)
    parser.add_argument("--swa-tokens", type=int, default=512)
    print(json.dumps(serve(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
