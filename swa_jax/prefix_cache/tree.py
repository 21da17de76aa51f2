"""The radix cache's state: arrays beside the allocator's, one entry a full page.

A cached page is a node and its node id is its full page id, so tree and allocator cannot disagree
about who holds what. A *tombstone* (full KV kept, SWA gone) is a page whose mapping is 0.

Legend: F full pages, P page_size, K tokens in a node's key (P, or P + 1 for bigram keys), H places
of the hash table, M receipts. Node 0, the padding page, stands for the root of every namespace.
"""

import functools
import operator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.choices import POLICIES
from swa_jax.config import PoolConfig
from swa_jax.prefix_cache.tree_text import tree_as_html, tree_as_text

ROOT = 0
LEAST = -(2**30)  # lowest rank; `select` compares values from here to its negative
EMPTY = 0  # place of the table that was never used
DELETED = -1  # place whose node is gone: a search goes on past it
MAX_PAGES = 2**28 - 1  # whose table still has int32 places
_LAST_SERIAL = 2**31 - 1  # serials go round from here to 1


@dataclass(frozen=True)
class CacheConfig:
    """What is static about a cache. Hashable."""

    pool: PoolConfig
    max_prefix_tokens: int  # longer prefixes are cached up to here
    is_bigram: bool  # a token's key is the pair with its successor (EAGLE drafts)
    policy: str  # which pages leave first, one of POLICIES
    hash_bits: int  # fewer than 32 force collisions: for tests

    def __post_init__(self) -> None:
        if self.pool.full_pages > MAX_PAGES:
            raise ValueError(
                f"a prefix cache takes at most 2^28 - 1 full pages, got {self.pool.full_pages}: "
                f"use pages of more than {self.pool.page_size} tokens"
            )

    @property
    def key_tokens(self) -> int:
        """Tokens that a node's page is compared by."""
        return self.pool.page_size + (1 if self.is_bigram else 0)

    @property
    def table_places(self) -> int:
        """A power of two, at least four times the pages: searches stay short."""
        return 1 << (4 * self.pool.full_pages + 1).bit_length()

    @property
    def most_receipts(self) -> int:
        """M, locks that can stand at once: one for each full page and 1,024 more.

        A running request has one lock and at least one page that is its own, for the token it
        computes, so requests alone never take more than there are pages; the others are for pins,
        and for the moment at which a request has its new lock and still the old one.
        """
        return self.pool.full_pages + 1024


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "in_tree",
        "parent",
        "depth",
        "namespace",
        "tokens",
        "children",
        "full_locks",
        "swa_locks",
        "last_use",
        "rank",
        "born",
        "hash",
        "place",
        "table",
        "num_deleted",
        "clock",
        "receipt_serial",
        "receipt_node",
        "receipt_boundary",
        "spare_receipts",
        "num_receipts",
        "serial",
    ],
    meta_fields=["config"],
)
@dataclass(frozen=True)
class PrefixCache:
    """A prefix tree over full pages. Make one with `init`. int32 where nothing else is said."""

    in_tree: jax.Array  # bool[F+1]
    parent: jax.Array  # [F+1] ROOT for the first page of a prefix
    depth: jax.Array  # [F+1] pages from the root, itself included
    namespace: jax.Array  # [F+1]
    tokens: jax.Array  # [F+1, K] the tokens themselves: a hash never decides alone
    children: jax.Array  # [F+1] how many
    full_locks: jax.Array  # [F+1]
    swa_locks: jax.Array  # [F+1]
    last_use: jax.Array  # [F+1] clock of the last match or insert that passed here
    rank: jax.Array  # [F+1] what the policy counts: hits, arrival or priority
    born: jax.Array  # [F+1] clock when the node came in: tells it from a later one on its page
    hash: jax.Array  # [F+1] of the whole prefix that ends here
    place: jax.Array  # [F+1] where the table names this node
    table: jax.Array  # [H] node ids, EMPTY or DELETED
    num_deleted: jax.Array  # [] DELETED places
    clock: jax.Array  # []
    receipt_serial: jax.Array  # [M] of the receipt that has this entry, 0 if none has
    receipt_node: jax.Array  # [M] what that receipt locked
    receipt_boundary: jax.Array  # [M] and how much of it in full alone
    spare_receipts: jax.Array  # [M] a stack: from `num_receipts` on the entries that are free
    num_receipts: jax.Array  # [] outstanding
    serial: jax.Array  # [] the last one given
    config: CacheConfig  # static

    def __repr__(self) -> str:
        return tree_as_text(self)

    def _repr_html_(self) -> str | None:
        return tree_as_html(self)


def init(
    config: PoolConfig,
    *,
    max_prefix_tokens: int | None = None,
    is_bigram: bool = False,
    policy: str = "lru",
    hash_bits: int = 32,
) -> PrefixCache:
    """An empty cache over the pages of an allocator with this configuration.

    Args:
      config: the allocator's.
      max_prefix_tokens: prefixes are cached up to this many tokens; all of them by default, and
        with any number from the pool's tokens on.
      is_bigram: compare pairs of tokens, as EAGLE's draft layer needs: a prefix of n tokens has
        n - 1 pairs, and only whole pages of pairs are cached.
      policy: which pages leave first: "lru", "lfu" (fewest matches), "fifo", "priority" (lowest
        `priority` given to `insert`), "cost" (least compute saved for its bytes, with recency).
      hash_bits: bits of the hash in use, 32 but in tests.

    Raises:
      ValueError: an unknown policy, sizes that cannot work, or a pool with request rings: a ring
        is its request's, so a cached prefix would have no SWA KV to go on from.
    """
    if not isinstance(config, PoolConfig):
        raise ValueError(f"config must be a PoolConfig, got {config!r}")
    if config.has_rings:
        raise ValueError(
            "a pool with request rings cannot have a prefix cache: what a window reads is in the "
            "ring of one request and is gone with it, so nobody could go on from a cached prefix; "
            "use PoolConfig(full_tokens, swa_tokens, ...)"
        )
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    most = config.full_tokens
    if max_prefix_tokens is not None:
        most = min(most, _not_negative("max_prefix_tokens", max_prefix_tokens))
    bits = _not_negative("hash_bits", hash_bits)
    if bits > 32:
        raise ValueError(f"hash_bits must be 0 .. 32, got {bits}")
    return new_cache(CacheConfig(config, most, is_bigram, policy, bits))


def _not_negative(name: str, value: object) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} must be an integer of 0 or more, got {value!r}")
    return number


def new_cache(config: CacheConfig) -> PrefixCache:
    """An empty cache with this static configuration."""
    nodes, receipts = config.pool.full_pages + 1, config.most_receipts

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    return PrefixCache(
        in_tree=jnp.zeros(nodes, bool),
        parent=zeros(nodes),
        depth=zeros(nodes),
        namespace=zeros(nodes),
        tokens=zeros(nodes, config.key_tokens),
        children=zeros(nodes),
        full_locks=zeros(nodes),
        swa_locks=zeros(nodes),
        last_use=zeros(nodes),
        rank=zeros(nodes),
        born=zeros(nodes),
        hash=zeros(nodes),
        place=zeros(nodes),
        table=zeros(config.table_places),
        num_deleted=zeros(),
        clock=zeros(),
        receipt_serial=zeros(receipts),
        receipt_node=zeros(receipts),
        receipt_boundary=zeros(receipts),
        spare_receipts=jnp.arange(receipts, dtype=jnp.int32),
        num_receipts=zeros(),
        serial=zeros(),
        config=config,
    )


def reset(cache: PrefixCache) -> PrefixCache:
    """Forgets every prefix. The pages stay held: free them, or `clear` the allocator.

    Receipts from before hold nothing any more.
    """
    # A jump, so that this is so for receipts of calls whose cache was thrown away, too.
    serial = serial_after(cache.serial, cache.config.most_receipts)
    return replace(new_cache(cache.config), serial=serial)


def serial_after(serial: jax.Array, steps: int) -> jax.Array:
    """int32[] a serial that many steps on: 1 .. 2^31 - 1, and round again."""
    return jnp.maximum((serial + jnp.int32(steps)) & jnp.int32(_LAST_SERIAL), 1)
