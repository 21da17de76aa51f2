"""What the loop carries: allocator, cache, KV, running rows, queue, figures.

Legend: R rows (requests that run at once), C pages of a row, N places of the queue.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax import prefix_cache
from swa_jax.inputs import whole_number
from swa_jax.models.decoder import DecoderConfig
from swa_jax.prefix_cache import PrefixCache, Receipt, no_receipt
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.queue import Queue, empty_queue
from swa_jax.serving.trees import Tree
from swa_jax.state import AllocatorState, init

NO_REQUEST = -1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "request",
        "length",
        "evicted",
        "last_loc",
        "table",
        "owned_from",
        "receipts",
        "fresh",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Rows:
    """The requests that run now."""

    request: jax.Array  # int32[R] place in the queue, NO_REQUEST where idle
    length: jax.Array  # int32[R] tokens whose KV is held
    evicted: jax.Array  # int32[R] tokens whose SWA pages are the row's no more
    last_loc: jax.Array  # int32[R] full slot of the last token, -1 for none
    table: jax.Array  # int32[R, C] first full slot of each page
    owned_from: jax.Array  # int32[R] tokens that stand on pages of the cache
    receipts: Receipt  # [R] the lock on those
    fresh: jax.Array  # bool[R] whole pages were prefilled and the cache has not got them yet


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "steps",
        "decode_steps",
        "generated",
        "prefilled",
        "cached",
        "admitted",
        "finished",
        "retracted",
        "recomputed",
        "drafted",
        "accepted",
        "evicted_full",
        "evicted_swa",
        "peak_full",
        "peak_swa",
        "peak_running",
        "refused",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Stats:
    """Figures so far, int32."""

    steps: jax.Array
    decode_steps: jax.Array  # steps in which some row decoded
    generated: jax.Array  # tokens
    prefilled: jax.Array  # tokens computed before the first output, again after a retraction
    cached: jax.Array  # tokens that were not computed since the cache had them
    admitted: jax.Array  # admissions, again after a retraction
    finished: jax.Array  # requests that left their row
    retracted: jax.Array  # retractions
    recomputed: jax.Array  # tokens whose KV a retraction gave up
    drafted: jax.Array  # tokens speculated on
    accepted: jax.Array  # of them those that were right
    evicted_full: jax.Array  # pages that the cache gave up
    evicted_swa: jax.Array  # pages
    peak_full: jax.Array  # pages held at most
    peak_swa: jax.Array  # pages
    peak_running: jax.Array  # rows
    refused: jax.Array  # grants refused: none, if the accounting is right


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["allocator", "cache", "kv", "draft", "rows", "queue", "stats", "refused_at"],
    meta_fields=[],
)
@dataclass(frozen=True)
class World:
    """The whole state of serving. Donate it to the call that changes it."""

    allocator: AllocatorState
    cache: PrefixCache | None
    kv: Tree  # of the model
    draft: Tree  # of the source of drafts
    rows: Rows
    queue: Queue
    stats: Stats
    refused_at: jax.Array  # int32[] requests ended when one last did not fit, -1: try again


def new_world(model: ServingModel | DecoderConfig, config: ServingConfig, places: int) -> World:
    """Nothing runs, nothing is cached, and the queue has that many empty places.

    Args:
      model: gives the KV.
      config: what is static.
      places: N, requests that can be known at once, static.
    """
    model, pool, rows = as_model(model), config.pool, config.max_running

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    cache = None
    if config.prefix_cache:
        longest = config.table_pages * pool.page_size
        cache = prefix_cache.init(
            pool,
            max_prefix_tokens=longest,
            is_bigram=config.key_lag > 0,
            policy=config.policy,
        )
    return World(
        allocator=init(pool),
        cache=cache,
        kv=model.init_kv(pool),
        draft=None if config.draft is None else config.draft.init(pool, rows),
        rows=Rows(
            request=jnp.full(rows, NO_REQUEST, jnp.int32),
            length=zeros(rows),
            evicted=zeros(rows),
            last_loc=jnp.full(rows, -1, jnp.int32),
            table=zeros(rows, config.table_pages),
            owned_from=zeros(rows),
            receipts=no_receipt(rows),
            fresh=jnp.zeros(rows, bool),
        ),
        queue=empty_queue(whole_number("places", places, 1), config.max_context, model.vocab_size),
        stats=Stats(*(zeros() for _ in Stats.__dataclass_fields__)),
        refused_at=jnp.full((), -1, jnp.int32),
    )


def running(rows: Rows) -> jax.Array:
    """bool[R] rows that hold a request."""
    return rows.request != NO_REQUEST


def of_rows(rows: Rows, values: jax.Array) -> jax.Array:
    """[R, ...] what the queue's [N, ...] `values` say of each row's request."""
    return values[jnp.maximum(rows.request, 0)]


def to_compute(world: World) -> jax.Array:
    """int32[R] known tokens of each row without KV: 1 for a row that decodes, more in prefill."""
    known = of_rows(world.rows, world.queue.known)
    return jnp.where(running(world.rows), known - world.rows.length, 0)


def ended(world: World) -> jax.Array:
    """bool[R] rows whose request is over."""
    return running(world.rows) & (of_rows(world.rows, world.queue.reason) != 0)


def check_world(config: ServingConfig, world: World) -> None:
    """Refuses a world that was made for another configuration.

    Raises:
      ValueError: says what differs.
    """
    seen = {
        "pool": (world.allocator.config, config.pool),
        "max_running": (world.rows.request.shape[0], config.max_running),
        "max_context": (world.queue.tokens.shape[1], config.max_context),
        "pages of a row": (world.rows.table.shape[1], config.table_pages),
        "prefix_cache": (world.cache is not None, config.prefix_cache),
    }
    for name, (made, wanted) in seen.items():
        if made != wanted:
            raise ValueError(
                f"the world was made with another configuration: its {name} is {made}, the "
                f"configuration's {wanted}"
            )


def add_stats(world: World, **more: jax.Array) -> World:
    """The same world with int32[] counts added to its figures."""
    now = {name: getattr(world.stats, name) + count for name, count in more.items()}
    return replace(world, stats=replace(world.stats, **now))
