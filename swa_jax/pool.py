"""The two things that happen to a pool: pages leave at the head, pages come back at the end.

Only this module writes a `PagePool`. A place that moves no page carries an id one past the end,
which every scatter drops, so both run without a branch and a refused call writes nothing.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.once import once
from swa_jax.paging import fetch, look_up, put
from swa_jax.rank import rank
from swa_jax.state import PAD_PAGE, PagePool


def nowhere(pool: PagePool) -> int:
    """The page id that no write reaches."""
    return pool.holders.shape[0]


def is_held(pool: PagePool, pages: jax.Array) -> jax.Array:
    """bool[...]: somebody holds the page. False for an id past the end."""
    return holders_of(pool, pages) > 0


def holders_of(pool: PagePool, pages: jax.Array) -> jax.Array:
    """int32[...] how many hold each page, 0 for one that is released or past the end."""
    return look_up(pool.holders, pages, 0)


def _place(pool: PagePool, offset: jax.Array) -> jax.Array:
    """Ring places of offsets 0 .. N-1 from the head.

    Written so that head + offset cannot pass int32 in a pool of 2^31 pages.
    """
    return _onward(pool, pool.head, offset)


def _onward(pool: PagePool, place: jax.Array, steps: jax.Array) -> jax.Array:
    """Ring places that are 0 .. N-1 steps on from one."""
    size = jnp.int32(pool.ring.shape[0])
    place = steps - (size - place)
    return jnp.where(place < 0, place + size, place)


def peek(pool: PagePool, ranks: jax.Array, most: int | None = None) -> jax.Array:
    """int32[K] page ids that the next grant hands out, by rank in it. Writes nothing.

    Ranks are below `most`, K by default (static): that many places from the head, and as many from
    the start of the ring in case it goes round, are all that is read (a slice costs the same in a
    pool of any size). Ranks past what the pool can grant give pages that a grant must not use.
    """
    size = pool.ring.shape[0]
    most = ranks.shape[0] if most is None else most
    if most >= size:
        safe = jnp.where(ranks < size, ranks, jnp.int32(0))
        return look_up(pool.ring, _place(pool, safe), PAD_PAGE)
    start = jnp.minimum(pool.head, jnp.int32(size - most))
    ahead = jax.lax.dynamic_slice(pool.ring, (start,), (most,))
    both = once(jnp.concatenate([ahead, pool.ring[:most]]))
    return fetch(both, ranks + (pool.head - start))


def take(pool: PagePool, pages: jax.Array, count: jax.Array) -> PagePool:
    """Grants the first `count` places of the ring, whose ids are `pages` (int32[K])."""
    advanced = _place(pool, jnp.minimum(count, jnp.int32(pool.ring.shape[0] - 1)))
    whole = count == jnp.int32(pool.ring.shape[0])  # all round: the head is where it was
    return replace(
        count_holders(pool, pages, jnp.int32(1)),
        head=jnp.where(whole, pool.head, advanced),
        num_free=pool.num_free - count,
    )


def count_holders(pool: PagePool, pages: jax.Array, holders: jax.Array) -> PagePool:
    """Writes the counts alone (a pure SWA state's full side has nothing else)."""
    return replace(pool, holders=put(pool.holders, pages, holders))


def give_back(
    pool: PagePool, pages: jax.Array, left: jax.Array, defer: jax.Array | bool
) -> PagePool:
    """Lowers counts of held pages, each named once, and releases those that nobody holds now.

    With `defer` they join the pending places at the end of the ring. Without, they must be
    grantable before the pending ones, so as many pending pages as needed move behind them.

    Args:
      pool: before the call.
      pages: int32[K] page ids; `nowhere(pool)` where a place names none.
      left: int32[K] how many hold each page afterwards.
      defer: bool[], queue for `free_group_end`.
    """
    size = pool.ring.shape[0]
    marks = once((pages < jnp.int32(nowhere(pool))) & (left == 0))
    ranks, count = rank(marks)
    waiting = pool.num_pending
    start = jnp.where(defer, pool.num_free + waiting, pool.num_free)
    outside = jnp.int32(size)
    to = jnp.where(marks, _onward(pool, _place(pool, start), once(ranks)), outside)

    places = jnp.arange(min(pages.shape[0], size), dtype=jnp.int32)
    moves = places < jnp.where(defer, 0, jnp.minimum(count, waiting))
    moved = fetch(pool.ring, _onward(pool, _place(pool, pool.num_free), places))
    behind = _place(pool, pool.num_free + jnp.maximum(count, waiting))
    ring = put(pool.ring, jnp.where(moves, _onward(pool, behind, places), outside), moved)

    return replace(
        count_holders(pool, pages, left),
        ring=put(ring, to, pages),
        num_free=pool.num_free + jnp.where(defer, 0, count),
        num_pending=waiting + jnp.where(defer, count, 0),
    )


def settle(pool: PagePool) -> PagePool:
    """Makes the pending pages grantable: they stand behind the free ones already."""
    return replace(
        pool, num_free=pool.num_free + pool.num_pending, num_pending=jnp.zeros_like(pool.head)
    )
