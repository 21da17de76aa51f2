"""The core's tree calls as the radix cache makes them: one program and one array of answers each.

The tree is donated, and so is the allocator where it changes. Numbers come in as one int32 array,
in the order that each function unpacks them.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.paging import look_up, page_of
from swa_jax.prefix_cache import PrefixCache, Receipt
from swa_jax.prefix_cache.find import Chain, find_chain
from swa_jax.prefix_cache.keys import cut_pages
from swa_jax.prefix_cache.match import window_start
from swa_jax.prefix_cache.tree import ROOT
from swa_jax.state import PAD_SLOT, UNMAPPED

# Columns of `read`, before the tokens.
IN_TREE, PARENT, DEPTH, BORN, NAMESPACE, TOMBSTONE, FULL_LOCKS, SWA_LOCKS, LAST_USE = range(9)


def _available(state: swa.AllocatorState) -> list[jax.Array]:
    return [swa.full_available_size(state), swa.swa_available_size(state)]


@functools.partial(jax.jit, donate_argnums=0)
def match(
    cache: PrefixCache, state: swa.AllocatorState, tokens: jax.Array, numbers: jax.Array
) -> tuple[PrefixCache, jax.Array]:
    """Looks int32[T] tokens up.

    Args:
      cache: the tree.
      state: the allocator beside it.
      tokens: int32[T], padded.
      numbers: length, namespace.

    Returns:
      The tree, and int32[T + 3]: slots, then length, node, the node's birth.
    """
    cache, found = prefix_cache.match_prefix(cache, state, tokens, numbers[0], namespace=numbers[1])
    news = [found.length, found.node, look_up(cache.born, found.node, 0)]
    return cache, jnp.concatenate([found.slots, jnp.stack(news)])


@functools.partial(jax.jit, donate_argnums=(0, 1))
def insert(
    cache: PrefixCache, state: swa.AllocatorState, rows: jax.Array, numbers: jax.Array
) -> tuple[PrefixCache, swa.AllocatorState, jax.Array]:
    """Hands a request's KV over to the tree.

    Args:
      cache: the tree.
      state: the allocator beside it.
      rows: int32[2, T] tokens and their full slots, padded.
      numbers: tokens to insert (whole pages of the tree), tokens with slots (as many or more),
        namespace, tokens that are the tree's already, tokens below which nothing has an SWA side,
        and whether to free (1) or leave to the caller (0) what is not taken.

    Returns:
      The tree, the allocator, and int32[T + 6]: the slots to use from here on, then tokens that
      were there before and are there now, the node, its birth, and the sizes available.
    """
    tokens, slots = rows[0], rows[1]
    length, total, namespace, previous, evicted, frees_rest = (numbers[i] for i in range(6))
    chain = find_chain(cache, cut_pages(cache.config, tokens, length, namespace))
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    cached = chain.count * jnp.int32(state.config.page_size)
    # What the caller says is the tree's is believed as far as the tree has it.
    mine = (place >= jnp.minimum(previous, cached)) & (place < total)
    own = jnp.where(mine, slots, PAD_SLOT)
    state = swa.free_swa(state, _with_swa_side(cache, state, own, place < evicted))

    parted = _split_at(cache, chain, length)
    cache, state, done = prefix_cache.insert(cache, state, tokens, length, own, namespace=namespace)
    cache = _touch(cache, parted)
    rest = _held_outside(cache, state, own, (place >= done.length) & (frees_rest > 0))
    state = swa.free(state, rest)
    kept = jnp.where(mine | (place < done.length), done.slots, slots)
    news = [done.length_already_cached, done.length, done.node, look_up(cache.born, done.node, 0)]
    return cache, state, jnp.concatenate([kept, jnp.stack(news + _available(state))])


def _with_swa_side(
    cache: PrefixCache, state: swa.AllocatorState, slots: jax.Array, marks: jax.Array
) -> jax.Array:
    """int32[T] the marked slots that have an SWA side and are not the tree's, else 0."""
    page = _pages(state, slots)
    live = look_up(state.full_to_swa, page, UNMAPPED) != UNMAPPED
    return jnp.where(marks & live & ~look_up(cache.in_tree, page, True), slots, PAD_SLOT)


def _held_outside(
    cache: PrefixCache, state: swa.AllocatorState, slots: jax.Array, marks: jax.Array
) -> jax.Array:
    """int32[T] the marked slots whose pages are held and are not the tree's, else 0."""
    page = _pages(state, slots)
    loose = ~look_up(state.full.free, page, True) & ~look_up(cache.in_tree, page, True)
    return jnp.where(marks & loose, slots, PAD_SLOT)


def _pages(state: swa.AllocatorState, slots: jax.Array) -> jax.Array:
    """int32[T] full pages, one past the end for what is no slot."""
    outside = state.full_to_swa.shape[0]
    return jnp.where(slots >= 0, page_of(jnp.maximum(slots, 0), state.config.page_size), outside)


def _split_at(cache: PrefixCache, chain: Chain, length: jax.Array) -> jax.Array:
    """bool[F+1]: what hangs on below the place where a prompt of `length` tokens parts.

    Only where it parts inside of a run of pages; and of the pages there only those that were last
    used together with the page above the parting.
    """
    last = jnp.maximum(chain.count - 1, 0)
    node = jnp.where(chain.count > 0, look_up(chain.nodes, last, ROOT), ROOT)
    goes_on = length > chain.count * jnp.int32(cache.config.pool.page_size)
    inside = goes_on & (node > ROOT) & (look_up(cache.children, node, 0) == 1)
    ids = jnp.arange(cache.in_tree.shape[0], dtype=jnp.int32)
    together = cache.in_tree & (cache.last_use == look_up(cache.last_use, node, 0))
    deepest = jnp.max(jnp.where(together, cache.depth, 0))
    reach = jnp.where(inside, deepest - look_up(cache.depth, node, 0), 0)

    def look(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        below, above, distance = carry
        return below | look_up(below, above, False), look_up(above, above, ROOT), distance * 2

    start = (ids == node, cache.parent, jnp.int32(1))
    below = jax.lax.while_loop(lambda carry: carry[2] <= reach, look, start)[0]
    return below & together & (ids != node) & inside


def _touch(cache: PrefixCache, marks: jax.Array) -> PrefixCache:
    """Makes the marked nodes as recent as the path that the last call has stamped.

    An engine whose nodes are runs of pages makes both parts of a run that is split most recent.
    """
    return replace(cache, last_use=jnp.where(marks, cache.clock, cache.last_use))


@functools.partial(jax.jit, donate_argnums=0)
def lock(
    cache: PrefixCache, state: swa.AllocatorState, numbers: jax.Array
) -> tuple[PrefixCache, jax.Array]:
    """Locks a node.

    Args:
      cache: the tree.
      state: the allocator beside it.
      numbers: node, its birth, and whether (1) nothing is to be locked where the last window is
        not live all through.

    Returns:
      The tree, and int32[6]: the node is in the tree, its window is not live and nothing was
      locked, and the four fields of the receipt.
    """
    node, born, whole = numbers[0], numbers[1], numbers[2] > 0
    known = look_up(cache.in_tree, node, False) & (look_up(cache.born, node, 0) == born)
    cache, receipt = prefix_cache.lock(cache, state, jnp.where(known, node, ROOT))
    start = window_start(cache.config, look_up(cache.depth, receipt.node, 0))
    short = whole & (receipt.boundary > start)
    back = jax.tree.map(lambda part: jnp.where(short, part, 0), receipt)
    kept = [jnp.where(short, 0, part) for part in jax.tree.leaves(receipt)]
    news = [known.astype(jnp.int32), short.astype(jnp.int32), *kept]
    return prefix_cache.unlock(cache, back), jnp.stack(news)


@functools.partial(jax.jit, donate_argnums=0)
def unlock(cache: PrefixCache, receipt: jax.Array) -> PrefixCache:
    """Undoes the lock whose receipt is int32[4]."""
    return prefix_cache.unlock(cache, Receipt(*(receipt[i] for i in range(4))))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def evict(
    cache: PrefixCache, state: swa.AllocatorState, numbers: jax.Array
) -> tuple[PrefixCache, swa.AllocatorState, jax.Array]:
    """Takes full and SWA tokens (`numbers`) from the tree.

    Returns:
      The tree, the allocator, and int32[4]: full and SWA tokens that went, and the sizes available.
    """
    cache, state, gone = prefix_cache.evict(
        cache, state, full_tokens=numbers[0], swa_tokens=numbers[1]
    )
    return cache, state, jnp.stack([gone.full_tokens, gone.swa_tokens, *_available(state)])


@jax.jit
def sizes(cache: PrefixCache, state: swa.AllocatorState) -> jax.Array:
    """int32[4] tokens: full evictable and protected, SWA evictable and protected."""
    return jnp.stack(
        [
            prefix_cache.full_evictable_size(cache, state),
            prefix_cache.full_protected_size(cache, state),
            prefix_cache.swa_evictable_size(cache, state),
            prefix_cache.swa_protected_size(cache, state),
        ]
    )


@jax.jit
def read(cache: PrefixCache, state: swa.AllocatorState) -> jax.Array:
    """int32[F+1, 9 + K]: of every node the columns named above, then its tokens."""
    columns = [cache.in_tree.astype(jnp.int32), cache.parent, cache.depth, cache.born]
    bare = (state.full_to_swa == UNMAPPED).astype(jnp.int32)
    columns += [cache.namespace, bare, cache.full_locks, cache.swa_locks, cache.last_use]
    return jnp.concatenate([jnp.stack(columns, axis=1), cache.tokens], axis=1)
