"""Timings of swa_jax's compiled loops."""

import jax
import numpy as np

from benchmarks import compiled
from benchmarks.cases import (
    TURNOVER_BY_SIDE,
    TURNOVER_GROUP,
    TURNOVER_SEGMENT,
    Case,
    Driver,
    expect_all_free,
)
from benchmarks.ours import OwnCalls
from benchmarks.timing import Job

NAME = "swa_jax, scan"


def _decode_job(driver: Driver) -> Job:
    own, steps = _own(driver), driver.workload.decode_steps
    lens = own.native(driver.workload.prompt_lens())

    def timed(given: tuple[np.ndarray, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own.state, slots, granted = compiled.decode_loop(own.state, lens, given[1], steps=steps)
        return jax.block_until_ready((own.state, slots, granted))[1:]

    def finish(given: tuple[np.ndarray, jax.Array], result: tuple[jax.Array, jax.Array]) -> None:
        _expect_granted(result[1])
        driver.release(np.concatenate([given[0], np.asarray(result[0]).reshape(-1)]))
        expect_all_free(driver)

    return Job(driver.prefill, timed, finish, steps)


def _turnover_case(name: str, release: compiled.Release) -> Case:
    def job(driver: Driver) -> Job:
        own, turns = _own(driver), driver.workload.scan_turns

        def timed(_: None) -> jax.Array:
            own.state, granted = compiled.turnover_loop(
                own.state,
                driver.rows,
                release=release,
                steps=turns,
                num_tokens=driver.workload.extend_slots,
            )
            return jax.block_until_ready((own.state, granted))[1]

        def finish(_: None, granted: jax.Array) -> None:
            _expect_granted(granted)
            expect_all_free(driver)

        return Job(lambda: None, timed, finish, turns)

    return Case(name, job)


DECODE = Case("decode", _decode_job)
# Each carries the name that the same work has as single calls.
TURNOVERS = (
    _turnover_case(TURNOVER_BY_SIDE, compiled.release_by_side),
    _turnover_case(TURNOVER_SEGMENT, compiled.release_segment),
    _turnover_case(TURNOVER_GROUP, compiled.release_in_group),
)


def _own(driver: Driver) -> OwnCalls:
    if not isinstance(driver.side, OwnCalls):
        raise TypeError(f"only swa_jax runs in a compiled loop, got {driver.side.name}")
    return driver.side


def _expect_granted(granted: jax.Array) -> None:
    if not bool(granted):
        raise RuntimeError("a step of the compiled loop was refused")
