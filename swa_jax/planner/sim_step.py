"""One step of one server by counts: leave, finish, admit, retract if short, grow, count.

Written for one server and run for many under `vmap`, so loops carry numbers, not rows.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.heavier import heavier
from swa_jax.paging import look_up, offset_of, page_of, pages_for
from swa_jax.planner.limits import Limits, cost_of, holds, most_of_both
from swa_jax.planner.loads import Load
from swa_jax.planner.sim_world import NO_REQUEST, SimRows, SimShape, SimTally, SimWorld
from swa_jax.rank import exclusive_sum
from swa_jax.wide import wide_add
from swa_jax.window import frontier, most_swa_pages

_LATE = 2**31 - 1
_Carry = tuple[jax.Array, ...]  # numbers, int32[] or bool[]


@dataclass(frozen=True)
class Held:
    """Pages of the rows before this step's growth."""

    left: jax.Array  # int32[R] SWA pages that each has left behind
    full: jax.Array  # int32[] full pages of all rows
    swa: jax.Array  # int32[] SWA pages of all rows


def unfinished(load: Load, world: SimWorld) -> jax.Array:
    """bool[] something waits or runs."""
    return (world.newest < load.count) | jnp.any(world.rows.request != NO_REQUEST)


def sim_step(shape: SimShape, limits: Limits, load: Load, world: SimWorld) -> SimWorld:
    """One step of a server; nothing happens at its end."""
    alive = unfinished(load, world)
    world = _finish(_skip_idle_time(load, world))
    world = _admit(shape, limits, load, world)
    world, held, demand = _make_room(shape, limits, world)
    world, after = _grow(shape, limits, world, held, demand)
    return _count(shape, limits, world, held, after, alive)


def pages_left(shape: SimShape, length: jax.Array) -> jax.Array:
    """int32[...] SWA pages that int32[...] tokens have left behind."""
    return page_of(frontier(shape.rule, length), shape.page_size)


def _held(shape: SimShape, rows: SimRows) -> Held:
    left, pages = pages_left(shape, rows.length), pages_for(rows.length, shape.page_size)
    full = jnp.sum(pages, dtype=jnp.int32)
    return Held(left, full, full - jnp.sum(left, dtype=jnp.int32))


def _runs(world: SimWorld) -> jax.Array:
    """bool[R] rows that run; the others are idle or wait."""
    return (world.rows.request != NO_REQUEST) & (world.rows.request < world.bound)


def _total(marks: jax.Array, values: jax.Array | int = 1) -> jax.Array:
    """int32[] sum of the values at bool[R] marks."""
    return jnp.sum(jnp.where(marks, values, 0), dtype=jnp.int32)


def _skip_idle_time(load: Load, world: SimWorld) -> SimWorld:
    """Where nobody is there, the clock goes to when the next one arrives."""
    comes = look_up(load.arrivals, world.newest, 0)
    empty = jnp.all(world.rows.request == NO_REQUEST)
    return replace(world, clock=jnp.where(empty, jnp.maximum(world.clock, comes), world.clock))


def _finish(world: SimWorld) -> SimWorld:
    rows = world.rows
    done = _runs(world) & (rows.length >= rows.final)
    completed = world.tally.completed + _total(done)
    return replace(
        world,
        rows=replace(
            rows,
            request=jnp.where(done, NO_REQUEST, rows.request),
            length=jnp.where(done, 0, rows.length),
        ),
        tally=replace(world.tally, completed=completed),
    )


def _admit(shape: SimShape, limits: Limits, load: Load, world: SimWorld) -> SimWorld:
    """First those that were sent back, then new ones, while the next one fits."""
    rows, size = world.rows, shape.page_size
    held, run = _held(shape, rows), _runs(world)
    opened = run & (rows.request >= world.fill)
    promised = jnp.where(opened, pages_for(rows.target, size) - pages_for(rows.length, size), 0)
    own_swa = pages_for(rows.length, size) - held.left
    owed = jnp.where(opened, jnp.maximum(most_swa_pages(shape.rule, rows.target) - own_swa, 0), 0)
    full = held.full + jnp.sum(promised, dtype=jnp.int32)
    swa = held.swa + jnp.sum(owed, dtype=jnp.int32)

    def fits(count: jax.Array, full: jax.Array, swa: jax.Array) -> jax.Array:
        """With a page to grow into for each that runs; alone a request always fits."""
        return (count == 0) | holds(limits, full + count, swa + count)

    def need(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pages_for(tokens, size), most_swa_pages(shape.rule, tokens)

    def again(carry: _Carry) -> _Carry:
        bound, count, full, swa, _ = carry
        first = jnp.min(jnp.where(rows.request >= bound, rows.request, _LATE))
        more_full, more_swa = need(_total(rows.request == first, rows.target))
        ok = (first < _LATE) & fits(count, full + more_full, swa + more_swa)
        return (
            jnp.where(ok, first + 1, bound),
            count + ok.astype(jnp.int32),
            full + jnp.where(ok, more_full, 0),
            swa + jnp.where(ok, more_swa, 0),
            ok,
        )

    waits = jnp.any(rows.request >= world.bound)
    start = (world.bound, _total(run), full, swa, waits)
    bound, count, full, swa, _ = jax.lax.while_loop(lambda carry: carry[4], again, start)
    waits = jnp.any(rows.request >= bound)

    def may(carry: _Carry) -> jax.Array:
        newest, count, full, swa, _ = carry
        more_full, more_swa = need(look_up(load.prompt_lens, newest, 0))
        there = (newest < load.count) & (look_up(load.arrivals, newest, 0) <= world.clock)
        room = (count < shape.rows) & fits(count, full + more_full, swa + more_swa)
        return ~waits & there & room

    def one(carry: _Carry) -> _Carry:
        newest, count, full, swa, wait = carry
        more_full, more_swa = need(look_up(load.prompt_lens, newest, 0))
        waited = world.clock - look_up(load.arrivals, newest, 0)
        return newest + 1, count + 1, full + more_full, swa + more_swa, jnp.maximum(wait, waited)

    start = (world.newest, count, full, swa, world.tally.longest_wait)
    newest, _, _, _, wait = jax.lax.while_loop(may, one, start)
    return replace(
        world,
        rows=_seat(load, rows, world.newest, newest),
        newest=newest,
        bound=jnp.where(waits, bound, newest),
        tally=replace(world.tally, longest_wait=wait),
    )


def _seat(load: Load, rows: SimRows, first: jax.Array, end: jax.Array) -> SimRows:
    """Puts the requests from `first` on, below `end`, into idle rows."""
    idle = rows.request == NO_REQUEST
    request = first + exclusive_sum(idle.astype(jnp.int32))
    comes = idle & (request < end)

    def put(old: jax.Array, new: jax.Array | int) -> jax.Array:
        return jnp.where(comes, new, old)

    return SimRows(
        request=put(rows.request, request),
        length=put(rows.length, 0),
        target=put(rows.target, look_up(load.prompt_lens, request, 0)),
        final=put(rows.final, look_up(load.final_lens, request, 0)),
    )


def _make_room(
    shape: SimShape, limits: Limits, world: SimWorld
) -> tuple[SimWorld, Held, jax.Array]:
    """Sends the newest back until this step can do something; int32[] pages for who decodes."""
    rows, size, fill = world.rows, shape.page_size, world.fill
    run, held = _runs(world), _held(shape, world.rows)
    decodes = run & (rows.request < fill)
    demand = _total(decodes & (offset_of(rows.length, size) == 0))
    first = jnp.min(jnp.where(run & (rows.request >= fill), rows.request, _LATE))
    in_page = offset_of(_total(rows.request == first, rows.length), size) > 0

    def stuck(carry: _Carry) -> jax.Array:
        _, count, decoding, demand, full, swa, _, _ = carry
        fits = holds(limits, full + demand, swa + demand)
        idle = (decoding == 0) & ~in_page & ~holds(limits, full + demand + 1, swa + demand + 1)
        return (count > 1) & (~fits | idle)

    def back(carry: _Carry) -> _Carry:
        bound, count, decoding, demand, full, swa, retracted, thrown = carry
        last = jnp.max(jnp.where(rows.request < bound, rows.request, NO_REQUEST))
        length = _total(rows.request == last, rows.length)
        pages, decoded = pages_for(length, size), (last < fill).astype(jnp.int32)
        opens = decoded * (offset_of(length, size) == 0).astype(jnp.int32)
        return (
            last,
            count - 1,
            decoding - decoded,
            demand - opens,
            full - pages,
            swa - pages + pages_left(shape, length),
            retracted + 1,
            wide_add(thrown, length),
        )

    tally = world.tally
    start = (world.bound, _total(run), _total(decodes), demand, held.full, held.swa)
    end = jax.lax.while_loop(stuck, back, (*start, tally.retracted, tally.recomputed))
    bound, _, _, demand, full, swa, retracted, thrown = end
    away = run & (rows.request >= bound)
    after = replace(
        world,
        rows=replace(
            rows,
            length=jnp.where(away, 0, rows.length),
            target=jnp.where(away, jnp.maximum(rows.target, rows.length), rows.target),
        ),
        bound=bound,
        fill=jnp.minimum(fill, bound),
        tally=replace(tally, retracted=retracted, recomputed=thrown),
    )
    return after, Held(jnp.where(away, 0, held.left), full, swa), demand


def _grow(
    shape: SimShape, limits: Limits, world: SimWorld, held: Held, demand: jax.Array
) -> tuple[SimWorld, jax.Array]:
    """A token for every row that decodes, a chunk for those in prefill; int32[R] new lengths."""
    rows, size, run = world.rows, shape.page_size, _runs(world)
    most = pages_for(limits.chunk_tokens, size) + shape.rows
    full, swa = held.full + demand, held.swa + demand
    room = most_of_both(limits, full, swa, most, shape.one_budget)

    def prefill(carry: _Carry) -> _Carry:
        """The oldest row in prefill takes what it can have; the next one only if that was all."""
        fill, tokens, pages, _, _ = carry
        first = jnp.min(jnp.where(run & (rows.request >= fill), rows.request, _LATE))
        this = rows.request == first
        length, target = _total(this, rows.length), _total(this, rows.target)
        in_page = pages_for(length, size) * jnp.int32(size) - length
        want = jnp.minimum(tokens, target - length)
        given = jnp.minimum(want, in_page + pages * jnp.int32(size))
        reached = length + given
        whole = (first < _LATE) & (reached == target)
        return (
            jnp.where(whole, first + 1, jnp.minimum(first, world.bound)),
            tokens - given,
            pages - pages_for(reached, size) + pages_for(length, size),
            jnp.where(whole, 0, reached),
            whole,
        )

    def go_on(carry: _Carry) -> jax.Array:
        return carry[4] & (carry[1] > 0)

    any_left = jnp.any(run & (rows.request >= world.fill))
    start = (world.fill, limits.chunk_tokens, room, jnp.int32(0), any_left)
    fill, _, _, reached, _ = jax.lax.while_loop(go_on, prefill, start)
    decoded = run & (rows.request < world.fill)
    filled = run & ~decoded & (rows.request < fill)
    part = run & (rows.request == fill) & (reached > 0)
    length = rows.length + decoded.astype(jnp.int32)
    length = jnp.where(filled, rows.target, jnp.where(part, reached, length))
    return replace(world, fill=fill), length


def _count(
    shape: SimShape,
    limits: Limits,
    world: SimWorld,
    held: Held,
    length: jax.Array,
    alive: jax.Array,
) -> SimWorld:
    """Brings the tally up to date with int32[R] the lengths after the step's growth."""
    tally, run = world.tally, _runs(world)
    full = jnp.sum(pages_for(length, shape.page_size), dtype=jnp.int32)
    swa = full - jnp.sum(held.left, dtype=jnp.int32)
    tokens = jnp.sum(length, dtype=jnp.int32)
    # What a step reads in SWA layers begins a window before the first token that it writes.
    read_from = jnp.sum(frontier(shape.token_rule, world.rows.length), dtype=jnp.int32)
    cost, running = cost_of(limits, full, swa), _total(run)
    pair = jnp.stack([full, swa])
    more = heavier(pair, tally.peak_pair, limits.weight)
    new = SimTally(
        steps=tally.steps + alive.astype(jnp.int32),
        completed=tally.completed,
        retracted=tally.retracted,
        recomputed=tally.recomputed,
        longest_wait=tally.longest_wait,
        peak_full=jnp.maximum(tally.peak_full, full),
        peak_swa=jnp.maximum(tally.peak_swa, swa),
        peak_running=jnp.maximum(tally.peak_running, running),
        peak_pair=jnp.where(more, pair, tally.peak_pair),
        peak_cost=jnp.maximum(tally.peak_cost, cost),
        sum_running=wide_add(tally.sum_running, running),
        sum_full_pages=wide_add(tally.sum_full_pages, full),
        sum_swa_pages=wide_add(tally.sum_swa_pages, swa),
        sum_full_tokens=wide_add(tally.sum_full_tokens, tokens),
        sum_swa_tokens=wide_add(tally.sum_swa_tokens, tokens - read_from),
        sum_cost=wide_add(tally.sum_cost, cost),
    )
    rows = replace(world.rows, length=length)
    clock = world.clock + alive.astype(jnp.int32)
    return replace(world, rows=rows, clock=clock, tally=new)
