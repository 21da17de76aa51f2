"""Timings of swa_jax's compiled loops."""

import jax
import numpy as np

from benchmarks import compiled
from benchmarks.cases import (
    TURNOVER_BY_SIDE,
    TURNOVER_GROUP,
    TURNOVER_SEGMENT,
    Driver,
    expect_all_free,
)
from benchmarks.ours import OwnCalls
from benchmarks.timing import Timing, measure

NAME = "swa_jax, scan"


def time_scans(driver: Driver, own: OwnCalls) -> dict[str, Timing]:
    """Every compiled loop, by the name that the same work has as single calls."""
    return {
        "decode": _time_decode(driver, own),
        TURNOVER_BY_SIDE: _time_turnover(driver, own, compiled.release_by_side),
        TURNOVER_SEGMENT: _time_turnover(driver, own, compiled.release_segment),
        TURNOVER_GROUP: _time_turnover(driver, own, compiled.release_in_group),
    }


def _time_decode(driver: Driver, own: OwnCalls) -> Timing:
    steps = driver.workload.decode_steps
    lens = own.native(driver.workload.prompt_lens())

    def timed(given: tuple[np.ndarray, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own.state, slots, granted = compiled.decode_loop(own.state, lens, given[1], steps=steps)
        return jax.block_until_ready((own.state, slots, granted))[1:]

    def finish(given: tuple[np.ndarray, jax.Array], result: tuple[jax.Array, jax.Array]) -> None:
        _expect_granted(result[1])
        driver.release(np.concatenate([given[0], np.asarray(result[0]).reshape(-1)]))
        expect_all_free(driver)

    return measure(driver.prefill, timed, finish, repeats=driver.workload.repeats, units=steps)


def _time_turnover(driver: Driver, own: OwnCalls, release: compiled.Turn) -> Timing:
    turns = driver.workload.scan_turns

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

    return measure(lambda: None, timed, finish, repeats=driver.workload.repeats, units=turns)


def _expect_granted(granted: jax.Array) -> None:
    if not bool(granted):
        raise RuntimeError("a step of the compiled loop was refused")
