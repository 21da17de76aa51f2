"""One turn of a prefill side and a decode side. Each function is one thing that happens.

A job is submitted to the prefill side; when its prompt is computed the decode side reserves room
for what it lacks; that comes in pieces; then it gets a row and decodes. It may be aborted anywhere.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax import serving
from swa_jax.disagg import deliver, give_up, has_arrived, pack_request, reserve, seat
from swa_jax.disagg.decode_side import NOT_YET
from swa_jax.disagg.inbox import NO_RESERVATION, standing
from swa_jax.only_if import only_if
from swa_jax.serving.queue import DONE, EMPTY
from swa_jax.serving.requests import FINISH_REASONS, LENGTH, STOP
from swa_jax.serving.world import World

from .asking import KINDS, Asked, as_requests, ask, keep_talk
from .dice import one_in, roll, seed_of
from .laws import text_laws_if
from .pair_load import (
    ARRIVED,
    ASKED,
    BEGINS,
    FREE,
    NOWHERE,
    PREFILLING,
    RUNNING,
    STAGES,
    Pair,
    Sides,
    add,
    newest,
    no_ask,
    oldest,
    put,
)
from .traces import Traces
from .weather import Weather

_STUCK = 8  # turns without anything new before somebody gives way


def _at(jobs_part, job: jax.Array):
    return jax.tree.map(lambda values: values[job], jobs_part)


def _release(world: World) -> World:
    places = jnp.arange(world.queue.status.shape[0], dtype=jnp.int32)
    return serving.release(world, jnp.where(world.queue.status == DONE, places, -1))


def _end(pair: Pair, gone: jax.Array) -> Pair:
    """Jobs bool[J] are over."""
    more = {name: gone & (pair.jobs.asked.kind == kind) for kind, name in enumerate(KINDS)}
    jobs = pair.jobs._replace(stage=jnp.where(gone, FREE, pair.jobs.stage))
    return add(pair._replace(jobs=jobs), ended=gone, **more)


def collect(sides: Sides, pair: Pair, seed: jax.Array) -> Pair:
    """Whoever has ended on either side leaves."""
    jobs, there, here = pair.jobs, pair.prefill.queue, pair.decode.queue
    done = (jobs.stage == RUNNING) & (here.status[jobs.here] == DONE)
    reason = jnp.where(done, here.reason[jobs.here], 0)
    # The prefill side says at once what can never be served there, or wants nothing.
    never = (jobs.stage == PREFILLING) & (there.status[jobs.there] == DONE)
    reason = jnp.where(never, there.reason[jobs.there], reason)
    more = {FINISH_REASONS[why]: reason == why for why in range(STOP, len(FINISH_REASONS))}
    hits = done & (here.cached[jobs.here] > 0)
    texts = text_laws_if(jnp.any(done), sides.model, here, pair.texts)
    served = done & ((reason == STOP) | (reason == LENGTH))
    some, job = oldest(jobs, served)
    place = jobs.here[job]
    talks = keep_talk(
        pair.talks, some, here.tokens[place], here.known[place], here.namespace[place], seed
    )
    pair = _end(add(pair, cache_hits=hits, **more), done | never)
    return pair._replace(
        texts=texts, talks=talks, prefill=_release(pair.prefill), decode=_release(pair.decode)
    )


def come(sides: Sides, pair: Pair, traces: Traces, weather: Weather, seed: jax.Array) -> Pair:
    """A new job, where there is room for it."""
    jobs = pair.jobs
    free = jnp.any(jobs.stage == FREE) & (pair.quota > 0)
    job = jnp.argmax(jobs.stage == FREE).astype(jnp.int32)
    asked = ask(sides.shape, traces, pair.talks, seed, weather.weights, pair.turn)
    doom = jnp.where(one_in(seed, 50, weather.cancel), roll(seed, 51, PREFILLING, RUNNING + 1), 0)
    jobs = jobs._replace(
        stage=put(jobs.stage, job, free, BEGINS),
        asked=jax.tree.map(lambda old, new: put(old, job, free, new), jobs.asked, asked),
        age=put(jobs.age, job, free, pair.turn),
        doom=put(jobs.doom, job, free, doom),
    )
    came = free.astype(jnp.int32)
    return pair._replace(jobs=jobs, turn=pair.turn + came, quota=pair.quota - came)


def begin(sides: Sides, pair: Pair) -> Pair:
    """The oldest job that neither side knows is submitted to the prefill side."""
    jobs = pair.jobs
    some, job = oldest(jobs, jobs.stage == BEGINS)
    asked: Asked = _at(jobs.asked, job)
    asked = asked._replace(new=jnp.minimum(asked.new, 1))  # the prompt is all that it computes
    requests = as_requests(jax.tree.map(lambda leaf: leaf[None], asked), some[None])
    prefill, places = serving.submit(sides.prefill, pair.prefill, requests)
    taken = places[0] >= 0
    jobs = jobs._replace(
        stage=put(jobs.stage, job, taken, PREFILLING), there=put(jobs.there, job, taken, places[0])
    )
    return pair._replace(prefill=prefill, jobs=jobs)


def reserve_room(sides: Sides, pair: Pair) -> Pair:
    """Room on the decode side for the oldest whose prompt is computed."""
    jobs = pair.jobs
    can = serving.ready(sides.prefill, pair.prefill)
    some, job = oldest(jobs, (jobs.stage == PREFILLING) & can[jobs.there])
    asked: Asked = _at(jobs.asked, job)
    length = jnp.where(some, asked.prompt_len - 1, -1)
    decode, arrivals, got = reserve(
        sides.decode, pair.decode, pair.arrivals, asked.tokens, length, namespace=asked.namespace
    )
    ok = some & got.ok
    jobs = jobs._replace(
        stage=put(jobs.stage, job, ok, ASKED),
        ask=jax.tree.map(lambda old, new: put(old, job, ok, new), jobs.ask, got.ask),
        full_from=put(jobs.full_from, job, ok, got.full_start),
        swa_from=put(jobs.swa_from, job, ok, got.swa_start),
    )
    pair = pair._replace(decode=decode, arrivals=arrivals, jobs=jobs)
    pair = add(pair, reservations=ok, reservations_refused=some & ~got.ok)
    never = some & got.never
    there = jnp.where(never, jobs.there[job], NOWHERE)
    pair = pair._replace(prefill=serving.cancel(pair.prefill, there[None]))
    return _end(add(pair, rejected=never), never & (jnp.arange(jobs.age.shape[0]) == job))


def send(sides: Sides, pair: Pair, seed: jax.Array) -> Pair:
    """A piece for the oldest that lacks one; now and then one that was sent before."""
    jobs = pair.jobs
    lacks = (jobs.full_from < jobs.ask.length) | (jobs.swa_from < jobs.ask.length)
    some, job = oldest(jobs, (jobs.stage == ASKED) & lacks)
    wanted = _at(jobs.ask, job)
    parcel = pack_request(
        sides.model,
        sides.prefill,
        pair.prefill,
        jnp.where(some, jobs.there[job], NOWHERE),
        wanted,
        full_capacity=sides.piece,
        swa_capacity=sides.piece,
        full_from=jobs.full_from[job],
        swa_from=jobs.swa_from[job],
    )
    is_late = one_in(seed, 60, 16) & (pair.late.ticket.serial != NO_RESERVATION)
    ticket = jax.tree.map(
        lambda late, new: jnp.where(is_late, late, new), pair.late.ticket, wanted.ticket
    )
    # A piece that names a reservation of the past, or tells this one what it has already.
    parcel = replace(parcel, piece=replace(parcel.piece, ticket=ticket))
    sent = some | is_late
    is_same = ticket.serial == wanted.ticket.serial
    stands = standing(pair.arrivals.inbox, ticket)[0]
    decode, arrivals, accepted = only_if(
        sent & (is_same | ~stands),
        lambda three: deliver(sides.model, sides.decode, three[0], three[1], parcel),
        (pair.decode, pair.arrivals, jnp.zeros((), bool)),
    )
    good = some & accepted & is_same
    step = jnp.int32(sides.piece)
    jobs = jobs._replace(
        full_from=put(
            jobs.full_from, job, good, jnp.minimum(jobs.full_from[job] + step, wanted.length)
        ),
        swa_from=put(
            jobs.swa_from, job, good, jnp.minimum(jobs.swa_from[job] + step, wanted.length)
        ),
    )
    pair = add(pair, pieces=good, late_pieces=is_late & ~accepted & ~stands)
    keeps = some & one_in(seed, 61, 4)
    late = jax.tree.map(lambda old, new: jnp.where(keeps, new, old), pair.late, wanted)
    return pair._replace(decode=decode, arrivals=arrivals, jobs=jobs, late=late)


def arrive(sides: Sides, pair: Pair) -> Pair:
    """Of whom all KV is here, the prefill side may forget the rest."""
    jobs, inbox = pair.jobs, pair.arrivals.inbox
    new = (jobs.stage == ASKED) & has_arrived(inbox)[jobs.ask.ticket.place]
    prefill = serving.end_sent(sides.prefill, pair.prefill, jnp.where(new, jobs.there, NOWHERE))
    jobs = jobs._replace(stage=jnp.where(new, ARRIVED, jobs.stage))
    return pair._replace(prefill=prefill, jobs=jobs)


def take_seat(sides: Sides, pair: Pair) -> Pair:
    """A row for the oldest that has arrived."""
    jobs = pair.jobs
    # One that is to be aborted after its KV has come waits for that.
    some, job = oldest(jobs, (jobs.stage == ARRIVED) & (jobs.doom != ARRIVED))
    asked: Asked = _at(jobs.asked, job)
    request = as_requests(jax.tree.map(lambda leaf: leaf[None], asked), some[None])
    ticket = jax.tree.map(
        lambda mine, none: jnp.where(some, mine, none), _at(jobs.ask, job).ticket, no_ask().ticket
    )
    decode, arrivals, place = only_if(
        some,
        lambda three: seat(sides.decode, three[0], three[1], ticket, request),
        (pair.decode, pair.arrivals, jnp.int32(NOT_YET)),
    )
    seated = some & (place != NOT_YET)
    jobs = jobs._replace(
        stage=put(jobs.stage, job, seated, RUNNING), here=put(jobs.here, job, seated, place)
    )
    return add(pair._replace(decode=decode, arrivals=arrivals, jobs=jobs), seated=seated)


def abort(sides: Sides, pair: Pair, seed: jax.Array) -> Pair:
    """One whose time has come is aborted; or the newest gives way where nobody gets on."""
    jobs = pair.jobs
    doomed = (jobs.stage == jobs.doom) & (jobs.stage != FREE)
    some, job = oldest(jobs, doomed & one_in(seed, 70, 3))
    stuck, last = newest(jobs, jobs.stage == ARRIVED)
    stuck = stuck & ~some & (pair.idle > _STUCK)
    job = jnp.where(some, job, last)
    stage = jobs.stage[job]
    reserved = (some & ((stage == ASKED) | (stage == ARRIVED))) | stuck
    decode, arrivals = only_if(
        reserved,
        lambda both: give_up(both[0], both[1], _at(jobs.ask, job).ticket),
        (pair.decode, pair.arrivals),
    )
    there = jnp.where(some & ((stage == PREFILLING) | (stage == ASKED)), jobs.there[job], NOWHERE)
    here = jnp.where(some & (stage == RUNNING), jobs.here[job], NOWHERE)
    # One that runs has ended when its row is empty.
    pair = pair._replace(
        prefill=serving.cancel(pair.prefill, there[None]),
        decode=serving.cancel(decode, here[None]),
        arrivals=arrivals,
        jobs=jobs._replace(
            stage=put(jobs.stage, job, stuck, BEGINS), doom=put(jobs.doom, job, some, FREE)
        ),
    )
    at = {f"aborted_{STAGES[n]}": some & (stage == n) for n in range(PREFILLING, len(STAGES))}
    gone = some & (stage != RUNNING)
    pair = add(pair, given_up_for_others=stuck, cancelled=gone, **at)
    return _end(pair, gone & (jnp.arange(jobs.age.shape[0]) == job))


def is_over(pair: Pair) -> jax.Array:
    """bool[] nobody is left on either side."""
    empty = jnp.all(pair.jobs.stage == FREE)
    for world in (pair.prefill, pair.decode):
        empty = empty & jnp.all(world.queue.status == EMPTY)
    return empty


def turn(sides: Sides, pair: Pair, traces: Traces, weather: Weather) -> Pair:
    """All of one turn, but for a look at the laws."""
    seed = seed_of(pair.seed, pair.watch.steps)
    pair = collect(sides, pair, seed)
    pair = come(sides, pair, traces, weather, seed)
    pair = begin(sides, pair)
    pair = pair._replace(prefill=serving.step(sides.model, sides.prefill, None, None, pair.prefill))
    pair = reserve_room(sides, pair)
    pair = send(sides, pair, seed)
    pair = arrive(sides, pair)
    pair = take_seat(sides, pair)
    pair = pair._replace(decode=serving.step(sides.model, sides.decode, None, None, pair.decode))
    return abort(sides, pair, seed)
