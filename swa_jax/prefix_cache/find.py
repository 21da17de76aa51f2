"""Finding the nodes of a prefix: one search for all pages, then a check of every link.

Each page is looked for by the hash of the whole prefix that ends with it, so all pages are searched
at once. What is found is believed only if its tokens are the page's and its parent is the node
found for the page before; where two prefixes share a hash, the search of that page is done again
with its parent known. Long prompts are followed block by block, as far as they are cached: what is
not there costs one block.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.paging import look_up
from swa_jax.prefix_cache.keys import Keys, ReadTokens, cut_pages_below
from swa_jax.prefix_cache.tree import EMPTY, ROOT, PrefixCache

BLOCK = 1024  # pages


@dataclass(frozen=True)
class Chain:
    """The longest chain of nodes that holds the pages of a prompt, whatever their SWA side."""

    nodes: jax.Array  # int32[N] node ids, ROOT from the first missing page on
    count: jax.Array  # int32[] pages found


def table_place(cache: PrefixCache, hashes: jax.Array, tries: jax.Array) -> jax.Array:
    """int32 place that a hash is looked for at its n-th try."""
    bits = jax.lax.bitcast_convert_type(hashes, jnp.uint32) + tries.astype(jnp.uint32)
    return (bits & jnp.uint32(cache.table.shape[0] - 1)).astype(jnp.int32)


def _search(cache: PrefixCache, keys: Keys) -> jax.Array:
    """int32[N] the first node with each page's hash and depth, ROOT where there is none."""
    place = jnp.arange(keys.hash.shape[0], dtype=jnp.int32)
    wanted, depth = place < keys.count, keys.depth + place + 1

    def look(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        found, seeking, tries = carry
        node = look_up(cache.table, table_place(cache, keys.hash, tries), EMPTY)
        real = jnp.maximum(node, ROOT)
        same = look_up(cache.hash, real, 0) == keys.hash
        same = same & (look_up(cache.depth, real, 0) == depth) & (node > ROOT)
        hit = seeking & same
        found = jnp.where(hit, node, found)
        return found, seeking & ~hit & (node != EMPTY), tries + 1

    def go_on(carry: tuple[jax.Array, ...]) -> jax.Array:
        _, seeking, tries = carry
        return jnp.any(seeking) & (tries < cache.table.shape[0])

    start = (jnp.full(depth.shape, ROOT, jnp.int32), wanted, jnp.int32(0))
    return jax.lax.while_loop(go_on, look, start)[0]


def _search_child(cache: PrefixCache, keys: Keys, page: jax.Array, parent: jax.Array) -> jax.Array:
    """int32[] the child of `parent` that holds this page of the prompt, ROOT if there is none."""
    tokens, hashed = keys.tokens[page], keys.hash[page]

    def is_it(node: jax.Array) -> jax.Array:
        real = jnp.maximum(node, ROOT)
        same = jnp.all(cache.tokens[real] == tokens) & (cache.parent[real] == parent)
        return (node > ROOT) & same & (cache.namespace[real] == keys.namespace)

    def node_at(tries: jax.Array) -> jax.Array:
        return look_up(cache.table, table_place(cache, hashed, tries), EMPTY)

    def go_on(tries: jax.Array) -> jax.Array:
        node = node_at(tries)
        return (node != EMPTY) & ~is_it(node) & (tries < cache.table.shape[0])

    node = node_at(jax.lax.while_loop(go_on, lambda tries: tries + 1, jnp.int32(0)))
    return jnp.where(is_it(node), node, ROOT)


def _first_bad(cache: PrefixCache, keys: Keys, nodes: jax.Array) -> jax.Array:
    """int32[] the first page whose node is missing or is not the right one; N if all are."""
    before = jnp.concatenate([keys.above[None], nodes[:-1]])
    right = (nodes > ROOT) & (look_up(cache.parent, nodes, -1) == before)
    right = right & (look_up(cache.namespace, nodes, 0) == keys.namespace)
    right = right & jnp.all(cache.tokens.at[nodes].get(mode="fill", fill_value=0) == keys.tokens, 1)
    places = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    return jnp.min(jnp.where(right, jnp.int32(nodes.shape[0]), places), initial=nodes.shape[0])


def find_chain(cache: PrefixCache, keys: Keys) -> Chain:
    """Follows a prompt's pages down from where its keys begin, as far as they are cached."""
    count = keys.hash.shape[0]
    if count <= BLOCK:
        return _follow(cache, keys)

    def block(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        nodes, found, _ = carry
        part, start = part_of(keys, nodes, found)
        more = _follow(cache, part)
        nodes = jax.lax.dynamic_update_slice(nodes, more.nodes, (start,))
        reached = start + more.count
        return nodes, reached, (more.count == BLOCK) & (reached < keys.count)

    start = (jnp.full(count, ROOT, jnp.int32), jnp.int32(0), keys.count > 0)
    nodes, found, _ = jax.lax.while_loop(lambda carry: carry[2], block, start)
    return Chain(nodes, found)


def find_prompt(
    cache: PrefixCache, read: ReadTokens, room: int, length: jax.Array, namespace: jax.Array
) -> Chain:
    """Follows a prompt from the root as far as it is cached, and reads no further.

    Args:
      cache: the tree.
      read: its tokens.
      room: most tokens of it, static.
      length: int32[] tokens of it that count.
      namespace: int32[] as for `match_prefix`.

    Returns:
      As `find_chain` of all its pages.
    """
    size, extra = cache.config.pool.page_size, cache.config.key_tokens - cache.config.pool.page_size
    pages = max(1, (room - extra) // size)
    width = min(BLOCK, pages)
    length = jnp.minimum(length, jnp.int32(room))

    def block(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        nodes, done, above, _ = carry
        start = done * jnp.int32(size)
        part = read(start, width * size + extra)
        keys = cut_pages_below(cache, above, part, length - start, namespace)
        more = _follow(cache, keys)
        nodes = jax.lax.dynamic_update_slice(nodes, more.nodes, (done,))
        full = (more.count == width) & (done + width < pages)
        return nodes, done + more.count, more.nodes[-1], full

    room_for = -(-pages // width) * width
    nodes = jnp.full(room_for, ROOT, jnp.int32)
    start = (nodes, jnp.int32(0), jnp.int32(ROOT), length > 0)
    if pages == width:
        nodes, found, _, _ = block(start)
    else:
        nodes, found, _, _ = jax.lax.while_loop(lambda carry: carry[3], block, start)
    return Chain(nodes[:pages], found)


def part_of(keys: Keys, nodes: jax.Array, done: jax.Array) -> tuple[Keys, jax.Array]:
    """`BLOCK` of a prompt's pages from int32[] `done` on, and int32[] where they begin.

    That is earlier where the prompt ends sooner: no part goes past the end.

    Args:
      keys: of more than `BLOCK` pages.
      nodes: int32[N] their nodes, those before the part in place.
      done: int32[].
    """
    start = jnp.minimum(done, jnp.int32(keys.hash.shape[0] - BLOCK))
    before = look_up(nodes, jnp.maximum(start - 1, 0), ROOT)
    part = replace(
        keys,
        tokens=jax.lax.dynamic_slice_in_dim(keys.tokens, start, BLOCK),
        hash=jax.lax.dynamic_slice_in_dim(keys.hash, start, BLOCK),
        count=keys.count - start,
        above=jnp.where(start > 0, before, keys.above),
        depth=keys.depth + start,
    )
    return part, start


def _follow(cache: PrefixCache, keys: Keys) -> Chain:
    count = keys.hash.shape[0]
    nodes = _search(cache, keys)

    def mistaken(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        nodes, bad = carry
        return (bad < count) & (look_up(nodes, bad, ROOT) != ROOT)

    def search_again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        nodes, bad = carry
        parent = jnp.where(bad > 0, nodes[jnp.maximum(bad - 1, 0)], keys.above)
        nodes = nodes.at[bad].set(_search_child(cache, keys, bad, parent), mode="drop")
        return nodes, _first_bad(cache, keys, nodes)

    nodes, bad = jax.lax.while_loop(mistaken, search_again, (nodes, _first_bad(cache, keys, nodes)))
    found = jnp.arange(count, dtype=jnp.int32) < bad
    return Chain(jnp.where(found, nodes, ROOT), bad)
