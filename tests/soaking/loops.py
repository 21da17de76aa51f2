"""The serving loop under mixed load, one compiled program for each block.

In each step, on the device: whoever is done is looked at and leaves, new requests come in, some
are cancelled, a fence goes up or down, the loop does its step, and every law is looked at. The
model's KV is the text itself, so a page of somebody else shows in the next token.

Legend: N places of the queue, K kinds of requests.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swa_jax import serving
from swa_jax.counts import held_pages
from swa_jax.only_if import only_if
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.queue import DONE, EMPTY, RUNNING, WAITING
from swa_jax.serving.requests import FINISH_REASONS, LENGTH, STOP
from swa_jax.serving.world import World, running
from swa_jax.state import AllocatorState
from tests.ledger_model import Ledger

from .asking import (
    KINDS,
    SESSION,
    TENANTS,
    Shape,
    Talks,
    as_requests,
    ask,
    keep_talk,
    new_talks,
    sampled,
)
from .counting import added
from .dice import one_in, roll, seed_of
from .laws import TEXT_LAWS, chunks_of, text_laws_if, world_laws
from .planted import Plant, spoil
from .traces import Traces
from .watch import Watch, is_intact, look, new_watch
from .weather import Weather

TALKS, SAMPLES, AT_ONCE = 16, 32, 2
_PATIENCE = 200  # steps in which nothing at all may happen, fences included

COUNTS = (
    "ended",
    *FINISH_REASONS[STOP:],
    *KINDS,
    *(f"tenant_{tenant}" for tenant in range(TENANTS)),
    "chunked",
    "session_hits",
    "cache_hits",
    "cancelled_waiting",
    "cancelled_running",
    "fences",
    "pages_freed_in_groups",
    "steps_at_99.9_percent",
    "steps_with_a_refusal",
    "drawn",
    "blocks_to_full",
    "blocks_to_swa",
)


class Samples(NamedTuple):
    """Texts for the host to look at. X of them."""

    tokens: jax.Array  # int32[X, L]
    prompt_lens: jax.Array  # int32[X]
    known: jax.Array  # int32[X] 0: none here
    ignore_eos: jax.Array  # bool[X]
    drawn: jax.Array  # bool[X] not the likeliest tokens
    so_far: jax.Array  # int32[]


class Load(NamedTuple):
    """What a block carries along."""

    world: World
    kinds: jax.Array  # int32[N] of the request at each place
    talks: Talks
    samples: Samples
    seed: jax.Array  # uint32[]
    turn: jax.Array  # int32[] requests that came in
    quota: jax.Array  # int32[] requests that may still come in
    idle: jax.Array  # int32[] steps since anything happened
    watch: Watch
    texts: dict[str, jax.Array]  # bool[] laws of the texts of those that were done last
    counts: dict[str, jax.Array]  # int32[] by name, of this block


class Static(NamedTuple):
    """What a program is compiled for."""

    model: Ledger
    config: ServingConfig
    shape: Shape
    draws: bool = False  # requests sample


def new_load(static: Static, places: int, seed: int) -> Load:
    """Nobody has come yet."""
    config = static.config
    none = jnp.zeros(SAMPLES, jnp.int32)
    texts = jnp.zeros((SAMPLES, config.max_context), jnp.int32)
    load = Load(
        world=serving.new_world(static.model, config, places),
        kinds=jnp.zeros(places, jnp.int32),
        talks=new_talks(TALKS, config.max_context),
        samples=Samples(texts, none, none, none > 0, none > 0, jnp.int32(0)),
        seed=jnp.uint32(seed),
        turn=jnp.int32(0),
        quota=jnp.int32(0),
        idle=jnp.int32(0),
        watch=new_watch(),
        texts=dict.fromkeys(TEXT_LAWS, jnp.ones((), bool)),
        counts={name: jnp.int32(0) for name in COUNTS},
    )
    return jax.tree.map(jnp.array, load)  # each its own buffer: all are given away


# ---- one step -------------------------------------------------------------------------------


def _add(load: Load, **more: jax.Array) -> Load:
    """Counts; bool[...] and int32[...] are summed."""
    return load._replace(counts=added(load.counts, **more))


def collect(static: Static, load: Load, seed: jax.Array) -> Load:
    """Whoever is done is counted, perhaps remembered, and leaves."""
    queue, config = load.world.queue, static.config
    done = queue.status == DONE
    hit = done & (queue.cached > 0)
    more = {"ended": done, "cache_hits": hit, "session_hits": hit & (load.kinds == SESSION)}
    for reason in range(STOP, len(FINISH_REASONS)):
        more[FINISH_REASONS[reason]] = done & (queue.reason == reason)
    for kind, name in enumerate(KINDS):
        more[name] = done & (load.kinds == kind)
    for tenant in range(TENANTS):
        more[f"tenant_{tenant}"] = done & (queue.namespace == tenant)
    served = done & ((queue.reason == STOP) | (queue.reason == LENGTH))
    computed = jnp.where(queue.cached >= 0, queue.prompt_lens - queue.cached, 0)
    drawn = queue.sampling.temperature > 0
    more["drawn"] = done & drawn
    more["chunked"] = served & (chunks_of(config, computed) > 1)
    load = _add(load, **more)
    place = jnp.argmax(served).astype(jnp.int32)
    tokens, known, some = queue.tokens[place], queue.known[place], jnp.any(served)
    talks = keep_talk(load.talks, some, tokens, known, queue.namespace[place], seed)
    kept = load.samples
    at = jnp.where(some & one_in(seed, 30, 50), jax.lax.rem(kept.so_far, SAMPLES), SAMPLES)
    kept = Samples(
        tokens=kept.tokens.at[at].set(tokens, mode="drop"),
        prompt_lens=kept.prompt_lens.at[at].set(queue.prompt_lens[place], mode="drop"),
        known=kept.known.at[at].set(known, mode="drop"),
        ignore_eos=kept.ignore_eos.at[at].set(queue.ignore_eos[place], mode="drop"),
        drawn=kept.drawn.at[at].set(drawn[place], mode="drop"),
        so_far=kept.so_far + (at < SAMPLES).astype(jnp.int32),
    )
    texts = text_laws_if(jnp.any(done), static.model, queue, load.texts, draws=static.draws)
    load = load._replace(texts=texts)
    places = jnp.arange(done.shape[0], dtype=jnp.int32)
    world = serving.release(load.world, jnp.where(done, places, -1))
    return load._replace(world=world, talks=talks, samples=kept)


def refill(static: Static, load: Load, traces: Traces, weather: Weather, seed: jax.Array) -> Load:
    """New requests take the places that are free."""
    lane = jnp.arange(AT_ONCE, dtype=jnp.int32)
    seeds = jax.vmap(lambda at: seed_of(seed, at))(lane)

    def one(seed: jax.Array, lane: jax.Array):
        return ask(static.shape, traces, load.talks, seed, weather.weights, load.turn + lane)

    asked = jax.vmap(one)(seeds, lane)
    sampling = sampled(seeds) if static.draws else None
    requests = as_requests(asked, lane < load.quota, sampling)
    world, places = serving.submit(static.config, load.world, requests)
    came = jnp.sum(places >= 0, dtype=jnp.int32)
    at = jnp.where(places >= 0, places, load.kinds.shape[0])
    return load._replace(
        world=world,
        kinds=load.kinds.at[at].set(asked.kind, mode="drop"),
        turn=load.turn + came,
        quota=load.quota - came,
    )


def disturb(load: Load, weather: Weather, seed: jax.Array) -> Load:
    """A request is cancelled, a fence goes up or down."""
    world = load.world
    status = world.queue.status
    place = roll(seed, 40, 0, status.shape[0])
    hit = one_in(seed, 41, weather.cancel)
    load = _add(
        load,
        cancelled_waiting=hit & (status[place] == WAITING),
        cancelled_running=hit & (status[place] == RUNNING),
    )
    world = serving.cancel(world, jnp.where(hit, place, -1)[None])
    is_open = world.allocator.group_open
    rises = ~is_open & one_in(seed, 42, weather.fence)
    falls = is_open & one_in(seed, 43, 3)
    waits = world.allocator.full.num_pending + world.allocator.swa.num_pending
    load = _add(load, fences=rises, pages_freed_in_groups=jnp.where(falls, waits, 0))
    world = only_if(falls, serving.lift_fence, world)
    return load._replace(world=only_if(rises, serving.raise_fence, world))


def turn(static: Static, load: Load, traces: Traces, weather: Weather, plant: Plant) -> Load:
    """All of one step."""
    seed = seed_of(load.seed, load.watch.steps)
    before = load.world
    load = collect(static, load, seed)
    load = refill(static, load, traces, weather, seed)
    load = disturb(load, weather, seed)
    world = spoiled(static.config, load.world, plant, load.watch.steps)
    world = serving.step(static.model, static.config, None, None, world)
    return _look(static, load._replace(world=world), before)


def spoiled(config: ServingConfig, world: World, plant: Plant, step: jax.Array) -> World:
    """The world after a mistake with the pages of the row that has most of its own."""
    rows = world.rows
    row = jnp.argmax(rows.length - rows.owned_from).astype(jnp.int32)
    first = jnp.arange(config.table_pages, dtype=jnp.int32) * config.pool.page_size
    own = (first >= rows.owned_from[row]) & (first < rows.length[row])
    slots = jnp.where(own, rows.table[row], 0)
    return replace(world, allocator=spoil(world.allocator, plant, step, slots))


def _is_full(allocator: AllocatorState) -> jax.Array:
    """bool[] 99.9 % of the full pool are held, or of what both pools share."""
    config, layout = allocator.config, allocator.config.unified_layout
    full, of_swa = held_pages(allocator)
    if layout is None:
        return full * 1000 >= jnp.int32(config.full_pages) * 999
    held = full * layout.full_units + of_swa * layout.swa_units
    return held * 1000 >= jnp.int32(layout.blocks * layout.block_units) * 999


def _moved_blocks(before: AllocatorState, after: AllocatorState) -> dict[str, jax.Array]:
    """bool[B] by count: blocks of one budget that a step has given to the other pool."""
    then, now = before.block_is_full, after.block_is_full
    if then is None or now is None:
        return {}
    return {"blocks_to_full": now & ~then, "blocks_to_swa": then & ~now}


def _look(static: Static, load: Load, before: World) -> Load:
    """Every law, and how full the pools are."""
    world, config = load.world, static.config
    full = _is_full(world.allocator)
    waits = jnp.any(world.queue.status == WAITING) & jnp.any(~running(world.rows))
    load = _add(load, **{"steps_at_99.9_percent": full, "steps_with_a_refusal": waits})
    load = _add(load, **_moved_blocks(before.allocator, world.allocator))
    now, then = world.stats, before.stats
    moved = (now.generated != then.generated) | (now.prefilled != then.prefilled)
    moved = moved | (now.finished != then.finished)
    moved = moved | jnp.any(world.queue.status == DONE)  # rejected at once, say
    idle = jnp.where(moved | ~jnp.any(world.queue.status != EMPTY), 0, load.idle + 1)
    laws = world_laws(config, world) | load.texts
    laws["it_goes_on"] = idle < _PATIENCE
    return load._replace(idle=idle, watch=look(load.watch, laws))


def law_names(static: Static, load: Load) -> list[str]:
    """Of what `_look` looks at."""
    laws = jax.eval_shape(lambda world: world_laws(static.config, world), load.world)
    return [*laws, *TEXT_LAWS, "it_goes_on"]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def run_block(
    static: Static,
    load: Load,
    traces: Traces,
    weather: Weather,
    goal: jax.Array,
    quota: jax.Array,
    plant: Plant,
) -> Load:
    """Steps until int32[] `goal` requests have ended or nobody is left, or a law has broken.

    Args:
      static: what is compiled.
      load: taken over.
      traces: both.
      weather: of this block.
      goal: requests.
      quota: requests that may still come in, in this block and later.
      plant: a mistake to be made.
    """
    counts = {name: jnp.int32(0) for name in COUNTS}
    watch = load.watch._replace(looks=jnp.int32(0))
    load = load._replace(quota=quota, counts=counts, watch=watch)

    def go_on(load: Load) -> jax.Array:
        some = (load.quota > 0) | jnp.any(load.world.queue.status != EMPTY)
        return is_intact(load.watch) & (load.counts["ended"] < goal) & some

    return jax.lax.while_loop(go_on, lambda load: turn(static, load, traces, weather, plant), load)
