"""Which rank each request of a replay goes to: where its prefix is, or in turn.

Between two slices the next requests are shown to every rank, which says what it has cached of them
and what it will have once it has served its queue; then they are placed one after the other. A
prefix is worth more load only up to `PER_TOKEN` times its length and a quarter of a full pool.

Legend: R ranks, K requests looked at together.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.data_parallel.placement import Loads, choose, load_of, look_at
from swa_jax.paging import floor_to_page
from swa_jax.prefix_cache.leaving import may_leave
from swa_jax.replay.content import Content, reader_of
from swa_jax.replay.engine import Carry
from swa_jax.replay.rank_loop import RankLoop, with_waiting, world_of
from swa_jax.replay.shared_world import SharedWorld
from swa_jax.replay.world import NO_REQUEST, Load, LoopConfig, prefilling

AHEAD = 4  # requests that wait at each rank after a placement
LEAST = 2  # with fewer than so many at one rank, the next are placed
# What a token of prefix may cost in load. Without a bound all go where the few tokens are that
# every prompt begins with, and ranks stay idle.
PER_TOKEN = 8
_QUEUE = 32  # requests of a queue that are compared with a new one


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hit", "kept", "coming", "load", "waiting"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Answer:
    """What a rank says of K requests."""

    hit: jax.Array  # int32[K] tokens it has cached
    kept: jax.Array  # int32[K] how many of them could be evicted
    coming: jax.Array  # int32[K] tokens it will have cached when its queue is served
    load: Loads
    waiting: jax.Array  # int32[] tokens that its queue comes to


def common_tokens(content: Content, one: jax.Array, others: jax.Array) -> jax.Array:
    """int32[Q] tokens that the prompts of int32[Q] `others` begin with like int32[] `one`."""
    theirs = content.blocks.at[others].get(mode="fill", fill_value=-1)
    equal = jnp.cumprod((content.blocks[one][None, :] == theirs).astype(jnp.int32), axis=1)
    tokens = jnp.sum(equal, axis=1, dtype=jnp.int32) * jnp.int32(content.block_tokens)
    lengths = content.prompt_lens.at[others].get(mode="fill", fill_value=0)
    return jnp.minimum(tokens, jnp.minimum(lengths, content.prompt_lens[one]))


def ask(
    config: LoopConfig,
    load: Load,
    content: Content | None,
    requests: jax.Array,
    count: jax.Array,
    carry: Carry,
) -> Answer:
    """One rank's answer for the first int32[] `count` of int32[K] `requests`."""
    world = world_of(carry)
    behind = jnp.sum(jnp.where(world.waiting, load.final_lens, 0), dtype=jnp.int32)
    nothing = jnp.zeros_like(requests)
    if content is None or not isinstance(carry, SharedWorld):
        return Answer(nothing, nothing, nothing, load_of(world.allocator, None), behind)
    state, cache = world.allocator, carry.cache
    may_go, room = may_leave(cache, state), config.table_pages * config.pool.page_size
    queue = _sent(world.rows.request, prefilling(world.rows), world.waiting)

    def one(index: jax.Array, found: jax.Array) -> jax.Array:
        request = requests[index]
        read = reader_of(content, request)
        length = load.prompt_lens[request]
        hit, kept = look_at(state, cache, may_go, read, room, length)
        coming = jnp.max(common_tokens(content, request, queue), initial=0)
        coming = floor_to_page(jnp.minimum(coming, length - 1), config.pool.page_size)
        return found.at[:, index].set(jnp.stack([hit, kept, coming]), mode="drop")

    found = jnp.zeros((3, requests.shape[0]), jnp.int32)
    hit, kept, coming = jax.lax.fori_loop(0, count, one, found)
    return Answer(hit, kept, coming, load_of(state, cache), behind)


def _sent(rows: jax.Array, prefilling: jax.Array, waiting: jax.Array) -> jax.Array:
    """int32[Q] requests whose prompts a rank has not, or not all, cached; N for none."""
    nobody = waiting.shape[0]
    (queue,) = jnp.nonzero(waiting, size=min(_QUEUE, nobody), fill_value=nobody)
    now = jnp.max(jnp.where(prefilling, rows, NO_REQUEST))
    now = jnp.where(now == NO_REQUEST, nobody, now)
    return jnp.concatenate([queue.astype(jnp.int32), now[None]])


@functools.partial(jax.jit, static_argnums=0)
def place_all(
    config: LoopConfig,
    load: Load,
    content: Content | None,
    requests: jax.Array,
    count: jax.Array,
    answers: Answer,
) -> jax.Array:
    """int32[K] ranks of the first `count` requests, each placed with those before it in mind."""
    ranks = answers.waiting.shape[0]
    slack = config.pool.full_tokens // 4

    def one(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        chosen, coming, waiting = carry
        request = requests[index]
        tokens = load.final_lens[request]
        rank = choose(
            config.pool,
            answers.load,
            answers.hit[:, index],
            answers.kept[:, index],
            tokens,
            waiting,
            slack,
            coming[:, index],
            PER_TOKEN,
        ).rank
        if content is not None:
            common = floor_to_page(common_tokens(content, request, requests), config.pool.page_size)
            coming = coming.at[rank].max(common, mode="drop")
        waiting = waiting.at[rank].add(tokens, mode="drop")
        return chosen.at[index].set(rank, mode="drop"), coming, waiting

    start = (jnp.full(requests.shape, ranks, jnp.int32), answers.coming, answers.waiting)
    return jax.lax.fori_loop(0, count, one, start)[0]


def _send(
    requests: jax.Array, chosen: jax.Array, number: jax.Array, waiting: jax.Array
) -> jax.Array:
    """bool[N] the queue of rank int32[] `number`, with those that were sent there."""
    at = jnp.where(chosen == number, requests, waiting.shape[0])
    return waiting.at[at].set(True, mode="drop")


class Placer:
    """Places the requests of one replay, in their order.

    Args:
      loop: the ranks.
      order: int32[A] the requests that are served.
    """

    def __init__(self, loop: RankLoop, order: np.ndarray) -> None:
        """Nothing is placed yet."""
        self._loop, self._order, self._done = loop, order, 0
        self.rank_of = np.full(loop.load.prompt_lens.shape, -1, np.int32)
        self._ask = jax.jit(loop.each(functools.partial(ask, loop.config), same=4))
        self._send = jax.jit(loop.each(_send, same=2), donate_argnums=3)
        self._numbers = loop.spread(np.arange(loop.ranks, dtype=np.int32))
        self._load, self._content = jax.device_get((loop.load, loop.content))

    @property
    def left(self) -> int:
        """Requests that are at no rank yet."""
        return len(self._order) - self._done

    def fill(self, carry: Carry, waiting: np.ndarray) -> Carry:
        """Sends requests until enough wait everywhere; int32[R] `waiting` of them do so far."""
        queued = waiting.copy()
        while self.left and queued.min() < LEAST:
            missing = int(np.maximum(AHEAD - queued, 0).sum())
            count = min(missing, self.left)
            carry, chosen = self._place(carry, count)
            queued += np.bincount(chosen, minlength=self._loop.ranks)
        return carry

    def _place(self, carry: Carry, count: int) -> tuple[Carry, np.ndarray]:
        loop = self._loop
        requests = np.zeros(AHEAD * loop.ranks, np.int32)
        requests[:count] = self._order[self._done : self._done + count]
        names, many = loop.same((requests, np.int32(count)))
        answers = jax.device_get(self._ask(loop.load, loop.content, names, many, carry))
        chosen = place_all(
            loop.config, self._load, self._content, requests, np.int32(count), answers
        )
        queues = self._send(names, loop.same(chosen), self._numbers, world_of(carry).waiting)
        ranks = np.asarray(chosen)[:count]
        self.rank_of[requests[:count]] = ranks
        self._done += count
        return with_waiting(carry, queues), ranks
