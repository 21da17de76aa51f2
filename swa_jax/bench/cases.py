"""The timed cases, in the words of `Side`: what is prepared, what is timed, what is undone."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from swa_jax.bench.side import Native, Side
from swa_jax.bench.timing import Job
from swa_jax.bench.workload import Point, Workload


@dataclass(frozen=True)
class Driver:
    """An allocator with one point's arrays in its native form."""

    side: Side
    workload: Workload
    point: Point
    rows: tuple[Native, ...]  # a fresh batch, as `extend` takes it
    tails: Native  # tokens at the end of each row that a tail extend gives SWA slots
    prompts: tuple[Native, ...]  # the rows that then decode
    decode_lens: tuple[Native, ...]  # lengths of every decode step
    ends: np.ndarray  # where each prompt's last slot is
    order: np.ndarray  # a random order of a batch's slots

    @classmethod
    def of(cls, side: Side, workload: Workload, point: Point) -> "Driver":
        """Converts every array beforehand: callers have them at hand, so it is not timed."""
        lens = point.prompt_lens()
        tail = min(workload.tail_tokens, point.row_tokens)
        return cls(
            side,
            workload,
            point,
            side.fresh_rows(np.full(point.rows, point.row_tokens, np.int32)),
            side.native(np.full(point.rows, tail, np.int32)),
            side.fresh_rows(lens),
            tuple(side.decode_rows(lens + step + 1) for step in range(workload.call_steps)),
            np.cumsum(lens) - 1,
            np.random.default_rng(0).permutation(point.slots),
        )

    def extend(self) -> Native:
        """A batch of prompts, its slots concatenated."""
        return self.side.extend(self.rows, self.point.slots)

    def extend_tail(self) -> Native:
        """A batch of prompts with SWA slots for their ends."""
        return self.side.extend_tail(self.rows, self.tails, self.point.slots)

    def prefill(self) -> tuple[np.ndarray, Native]:
        """The rows that decode: their slots, and what the first decode step needs of them."""
        granted = self.side.extend(self.prompts, int(self.point.prompt_lens().sum()))
        return self.side.numpy(granted), self.side.last_of(granted, self.ends)

    def in_any_order(self, granted: Native) -> Native:
        """The slots of a batch, mixed."""
        return self.side.native(self.side.numpy(granted)[self.order])

    def release(self, slots: np.ndarray) -> None:
        """Frees every page of which the first slot is among `slots`; for what is not timed."""
        self.side.give_back(self._heads(slots))

    def release_full(self, slots: np.ndarray) -> None:
        """The same where the SWA sides are gone already."""
        self.side.give_back_full(self._heads(slots))

    def _heads(self, slots: np.ndarray) -> np.ndarray:
        return slots[slots % self.point.page_size == 0]


@dataclass(frozen=True)
class Case:
    """One line of the table. `needs` are the methods without which a side has no such case."""

    name: str
    job: Callable[[Driver], Job]
    needs: frozenset[str] = frozenset()
    decodes: bool = False  # its size is the batch that decodes, not the batch that is extended
    of_ours: bool = False  # what only a compiled call has


def _free_case(method: str, *, first: str | None = None) -> Case:
    """A free of a whole batch, `first` called on it before and not timed.

    Of segments in token order, of others in a random order of slots: any set.
    """

    def job(driver: Driver) -> Job:
        side = driver.side

        def prepare() -> Native:
            slots = driver.extend()
            if "segment" not in method:
                slots = driver.in_any_order(slots)
            if first is not None:
                getattr(side, first)(slots)
            return slots

        def finish(slots: Native, _: None) -> None:
            if "swa" in method:
                driver.release_full(side.numpy(slots))
            expect_all_free(driver)

        return Job(prepare, getattr(side, method), finish)

    return Case(method, job, frozenset({method}))


def _extend_case(name: str, extend: Callable[[Driver], Native], needs: frozenset[str]) -> Case:
    def job(driver: Driver) -> Job:
        def finish(_: None, slots: Native) -> None:
            driver.release(driver.side.numpy(slots))
            expect_all_free(driver)

        return Job(lambda: None, lambda _: extend(driver), finish)

    return Case(name, job, needs)


def _decode_job(driver: Driver) -> Job:
    side = driver.side

    def timed(given: tuple[np.ndarray, Native]) -> list[Native]:
        last, granted = given[1], []
        for seq_lens in driver.decode_lens:
            last = side.decode(seq_lens, last)
            granted.append(last)
        return granted

    def finish(given: tuple[np.ndarray, Native], granted: list[Native]) -> None:
        driver.release(np.concatenate([given[0], *(side.numpy(step) for step in granted)]))
        expect_all_free(driver)

    return Job(driver.prefill, timed, finish, driver.workload.call_steps)


def _grouped_job(driver: Driver) -> Job:
    side = driver.side

    def timed(slots: Native) -> None:
        side.group_begin()
        side.free(slots)
        side.group_end()

    return Job(
        lambda: driver.in_any_order(driver.extend()), timed, lambda _, __: expect_all_free(driver)
    )


def _group_end_job(driver: Driver) -> Job:
    side = driver.side

    def prepare() -> None:
        slots = driver.in_any_order(driver.extend())
        side.group_begin()
        side.free(slots)

    return Job(prepare, lambda _: side.group_end(), lambda _, __: expect_all_free(driver))


def _turnover_case(name: str, methods: tuple[str, ...]) -> Case:
    """Extend, then `methods` on its slots, as in one step of the compiled loop."""

    def job(driver: Driver) -> Job:
        side, turns = driver.side, driver.workload.call_turns
        release = [getattr(side, method) for method in methods]

        def timed(_: None) -> None:
            for _turn in range(turns):
                slots = driver.extend()
                for call in release:
                    call(slots)

        return Job(lambda: None, timed, lambda _, __: expect_all_free(driver), turns)

    return Case(name, job, frozenset(methods))


def _nothing_job(driver: Driver) -> Job:
    return Job(lambda: None, lambda _: driver.side.nothing(), lambda _, __: None)


DECODE = Case("decode", _decode_job, frozenset({"decode"}), decodes=True)
EXTEND = _extend_case("extend", Driver.extend, frozenset())
TAIL_EXTEND = _extend_case("tail extend", Driver.extend_tail, frozenset({"extend_tail"}))
FREE = _free_case("free")
FREE_SWA = _free_case("free_swa")
FREE_FULL = _free_case("free_full", first="free_swa")
FREE_SEGMENT = _free_case("free_segment")
FREE_SWA_SEGMENT = _free_case("free_swa_segment")
GROUPED_FREE = Case("grouped free", _grouped_job, frozenset({"free", "group_end"}))
GROUP_END = Case("group end", _group_end_job, frozenset({"free", "group_end"}))
TURNOVER = _turnover_case("extend + free", ("free",))
TURNOVER_BY_SIDE = _turnover_case("extend + free_swa + free_full", ("free_swa", "free_full"))
TURNOVER_SEGMENT = _turnover_case("extend + free_segment", ("free_segment",))
NOTHING = Case("dispatch alone", _nothing_job, of_ours=True)

FREES = (FREE, FREE_SWA, FREE_FULL, FREE_SEGMENT, FREE_SWA_SEGMENT, GROUPED_FREE, GROUP_END)
TURNOVERS = (TURNOVER, TURNOVER_BY_SIDE, TURNOVER_SEGMENT)
CASES = (DECODE, EXTEND, TAIL_EXTEND, *FREES, *TURNOVERS, NOTHING)


def plan(workload: Workload) -> list[tuple[Case, list[Point]]]:
    """At which points each case is timed, each once."""
    at_sizes = (*workload.at_pools, *workload.at_pages)
    points: dict[Case, tuple[Point, ...]] = {
        DECODE: (*at_sizes, *workload.at_batches),
        EXTEND: (*at_sizes, *workload.at_slots, workload.at_long_row),
        TAIL_EXTEND: (workload.at_long_row,),
        **dict.fromkeys(FREES, (*at_sizes, *workload.at_slots)),
        **dict.fromkeys(TURNOVERS, workload.at_pools),
        NOTHING: (workload.main,),
    }
    return [(case, list(dict.fromkeys(points[case]))) for case in CASES]


def fits(case: Case, point: Point, workload: Workload) -> bool:
    """Whether the pool has room for a repetition."""
    needed = point.decode_tokens(workload.loop_steps) if case.decodes else point.slots
    return needed <= point.pool_tokens


def expect_all_free(driver: Driver) -> None:
    """A repetition must leave no page behind: a leak would make the next one cheaper or fail."""
    available, tokens = driver.side.available(), driver.point.pool_tokens
    if available != (tokens, tokens):
        raise RuntimeError(
            f"{driver.side.name} should have all {tokens} tokens free again, has {available}"
        )
