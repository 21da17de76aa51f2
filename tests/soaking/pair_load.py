"""A prefill side and a decode side, and the jobs on their way between them.

Legend: J jobs at a time, L most tokens of a request.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from swa_jax import serving
from swa_jax.disagg import Arrivals, Ask, Ticket, new_arrivals
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.requests import FINISH_REASONS, STOP
from swa_jax.serving.world import World
from tests.ledger_model import Ledger

from .asking import KINDS, Asked, Shape, Talks, new_talks
from .counting import added
from .laws import TEXT_LAWS
from .watch import Watch, new_watch

# The way of a job. WAITING ones are not known to either side.
STAGES = ("free", "waiting", "prefilling", "asked", "arrived", "running")
FREE, BEGINS, PREFILLING, ASKED, ARRIVED, RUNNING = range(len(STAGES))
NOWHERE = -1

COUNTS = (
    "ended",
    *FINISH_REASONS[STOP:],
    *KINDS,
    *(f"aborted_{stage}" for stage in STAGES[PREFILLING:]),
    "reservations",
    "reservations_refused",
    "pieces",
    "late_pieces",
    "seated",
    "cache_hits",
    "given_up_for_others",
    "steps_at_99.9_percent",
)


class Sides(NamedTuple):
    """What a program is compiled for."""

    model: Ledger
    prefill: ServingConfig
    decode: ServingConfig
    shape: Shape
    piece: int  # tokens


class Jobs(NamedTuple):
    """All jobs that are open. int32[J], if nothing else is said."""

    stage: jax.Array
    asked: Asked  # [J]
    age: jax.Array  # the order in which they came
    doom: jax.Array  # the stage in which it is aborted, FREE: in none
    there: jax.Array  # place in the prefill side's queue, NOWHERE
    here: jax.Array  # likewise in the decode side's
    ask: Ask  # [J] what was lacking
    full_from: jax.Array  # tokens that were sent
    swa_from: jax.Array


class Pair(NamedTuple):
    """All that a block carries along."""

    prefill: World
    decode: World
    arrivals: Arrivals
    jobs: Jobs
    late: Ask  # of a piece that is sent once more
    talks: Talks
    seed: jax.Array  # uint32[]
    turn: jax.Array  # int32[] jobs so far
    quota: jax.Array  # int32[] jobs that may still come
    idle: jax.Array  # int32[] turns since anything happened
    watch: Watch
    texts: dict[str, jax.Array]
    counts: dict[str, jax.Array]


def no_ask(*shape: int) -> Ask:
    """Asks that name nothing."""
    zero = jnp.zeros(shape, jnp.int32)
    return Ask(zero, zero, zero, Ticket(zero + NOWHERE, zero))


def new_pair(sides: Sides, jobs: int, places: int, seed: int) -> Pair:
    """Nobody has come yet."""
    none = jnp.zeros(jobs, jnp.int32)
    columns = sides.decode.max_context
    decode = serving.new_world(sides.model, sides.decode, places)
    asked = Asked(jnp.zeros((jobs, columns), jnp.int32), none, none, none, none > 0, none)
    pair = Pair(
        prefill=serving.new_world(sides.model, sides.prefill, places),
        decode=decode,
        arrivals=new_arrivals(sides.decode, decode, 4),
        jobs=Jobs(
            none, asked, none, none, none + NOWHERE, none + NOWHERE, no_ask(jobs), none, none
        ),
        late=no_ask(),
        talks=new_talks(8, columns),
        seed=jnp.uint32(seed),
        turn=jnp.int32(0),
        quota=jnp.int32(0),
        idle=jnp.int32(0),
        watch=new_watch(),
        texts={name: jnp.ones((), bool) for name in TEXT_LAWS},
        counts={name: jnp.int32(0) for name in COUNTS},
    )
    return jax.tree.map(jnp.array, pair)  # each its own buffer: all are given away


def add(pair: Pair, **more: jax.Array) -> Pair:
    """Counts; bool[...] and int32[...] are summed."""
    return pair._replace(counts=added(pair.counts, **more))


def oldest(jobs: Jobs, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[] whether some job is bool[J] `wanted`, and int32[] the oldest of them."""
    age = jnp.where(wanted, jobs.age, jnp.int32(2**31 - 1))
    return jnp.any(wanted), jnp.argmin(age).astype(jnp.int32)


def newest(jobs: Jobs, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `oldest`, the newest of them."""
    return jnp.any(wanted), jnp.argmax(jnp.where(wanted, jobs.age, -1)).astype(jnp.int32)


def put(values: jax.Array, at: jax.Array, some: jax.Array, value: jax.Array | int) -> jax.Array:
    """[J] with a value at one place, if bool[] `some`."""
    return values.at[jnp.where(some, at, values.shape[0])].set(value, mode="drop")
