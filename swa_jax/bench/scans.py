"""Timings of swa_jax's compiled loops.

A loop extends, or frees, as many batches as the pool holds, one after the other: what a free gives
back was granted before the clock starts. A step's time is the loop's over its steps, so that the
dispatch of the loop is a part of it: where the pool holds one batch alone, all of it.
"""

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax.bench import cases, compiled
from swa_jax.bench.cases import Case, Driver, expect_all_free
from swa_jax.bench.ours import OwnCalls
from swa_jax.bench.timing import Job

NAME = "swa_jax, loop"


def _decode_job(driver: Driver) -> Job:
    own, steps = _own(driver), driver.workload.loop_steps
    lens = own.native(driver.point.prompt_lens())

    def timed(given: tuple[np.ndarray, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own.state, slots, granted = compiled.decode_loop(own.state, lens, given[1], steps=steps)
        return jax.block_until_ready((own.state, slots, granted))[1:]

    def finish(given: tuple[np.ndarray, jax.Array], result: tuple[jax.Array, jax.Array]) -> None:
        _expect_granted(result[1])
        driver.release(np.concatenate([given[0], np.asarray(result[0]).reshape(-1)]))
        expect_all_free(driver)

    return Job(driver.prefill, timed, finish, steps)


def _extend_case(like: Case, *, tail: bool) -> Case:
    def job(driver: Driver) -> Job:
        def finish(_: None, slots: jax.Array) -> None:
            driver.release(np.asarray(slots).reshape(-1))
            expect_all_free(driver)

        sets = driver.workload.sets(driver.point)
        return Job(lambda: None, lambda _: _extend(driver, tail=tail), finish, sets)

    return Case(like.name, job, decodes=like.decodes)


def _extend(driver: Driver, *, tail: bool = False) -> jax.Array:
    """int32[N, T] slots of as many batches as the pool holds."""
    own, sets = _own(driver), driver.workload.sets(driver.point)
    own.state, slots, granted = compiled.extend_loop(
        own.state,
        driver.rows,
        driver.tails if tail else None,
        steps=sets,
        num_tokens=driver.point.slots,
    )
    jax.block_until_ready((own.state, slots))
    _expect_granted(granted)
    return slots


def _free_case(
    like: Case,
    release: compiled.Release,
    *,
    any_order: bool,
    first: compiled.Release | None = None,
    undo: bool = False,
) -> Case:
    def job(driver: Driver) -> Job:
        own = _own(driver)

        def prepare() -> jax.Array:
            slots = _extend(driver)
            if first is not None:
                own.state = compiled.release_loop(own.state, slots, release=first)
            mixed = slots[:, jnp.asarray(driver.order, jnp.int32)] if any_order else slots
            return jax.block_until_ready((own.state, mixed))[1]

        def timed(slots: jax.Array) -> None:
            own.state = compiled.release_loop(own.state, slots, release=release)
            jax.block_until_ready(own.state)

        def finish(slots: jax.Array, _: None) -> None:
            if undo:
                driver.release(np.asarray(slots).reshape(-1))
            expect_all_free(driver)

        return Job(prepare, timed, finish, driver.workload.sets(driver.point))

    return Case(like.name, job)


def _turnover_case(like: Case, release: compiled.Release) -> Case:
    def job(driver: Driver) -> Job:
        own, turns = _own(driver), driver.workload.loop_turns

        def timed(_: None) -> jax.Array:
            own.state, granted = compiled.turnover_loop(
                own.state,
                driver.rows,
                release=release,
                steps=turns,
                num_tokens=driver.point.slots,
            )
            return jax.block_until_ready((own.state, granted))[1]

        def finish(_: None, granted: jax.Array) -> None:
            _expect_granted(granted)
            expect_all_free(driver)

        return Job(lambda: None, timed, finish, turns)

    return Case(like.name, job)


def _own(driver: Driver) -> OwnCalls:
    if not isinstance(driver.side, OwnCalls):
        raise TypeError(f"only swa_jax runs in a compiled loop, got {driver.side.name}")
    return driver.side


def _expect_granted(granted: jax.Array) -> None:
    if not bool(granted):
        raise RuntimeError("a step of the compiled loop was refused")


# Each carries the name that the same work has as single calls. A group's end alone is not one of
# them: it can only be timed with the frees that it ends.
LOOPS = {
    loop.name: loop
    for loop in (
        Case(cases.DECODE.name, _decode_job, decodes=True),
        _extend_case(cases.EXTEND, tail=False),
        _extend_case(cases.TAIL_EXTEND, tail=True),
        _free_case(cases.FREE, swa.free, any_order=True),
        _free_case(cases.FREE_SWA, swa.free_swa, any_order=True, undo=True),
        _free_case(cases.FREE_FULL, swa.free_full, any_order=True, first=swa.free_swa_segment),
        _free_case(cases.FREE_SEGMENT, swa.free_segment, any_order=False),
        _free_case(cases.FREE_SWA_SEGMENT, swa.free_swa_segment, any_order=False, undo=True),
        _free_case(cases.GROUPED_FREE, compiled.release_in_group, any_order=True),
        _free_case(cases.NOTHING, lambda state, _: state, any_order=False, undo=True),
        _turnover_case(cases.TURNOVER, swa.free),
        _turnover_case(cases.TURNOVER_BY_SIDE, compiled.release_by_side),
        _turnover_case(cases.TURNOVER_SEGMENT, swa.free_segment),
    )
}
