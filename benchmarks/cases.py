"""The timed cases, in the words of `Side`: what is prepared, what is timed, what is undone."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.side import Native, Side
from benchmarks.timing import Job
from benchmarks.workload import Workload


@dataclass(frozen=True)
class Driver:
    """An allocator with this workload's arrays in its native form."""

    side: Side
    workload: Workload
    tokens: int  # in each pool
    rows: tuple[Native, Native, Native]  # prefix_lens, seq_lens, last_loc of a fresh batch
    prompts: tuple[Native, Native, Native]  # of the rows that then decode
    decode_lens: tuple[Native, ...]  # seq_lens of every decode step
    tail: np.ndarray  # where each prompt's last slot is

    @classmethod
    def of(cls, side: Side, workload: Workload, tokens: int) -> "Driver":
        """Converts every array beforehand: callers have them at hand, so it is not timed."""
        lens = workload.prompt_lens()
        extend = np.full(workload.extend_rows, workload.extend_tokens, np.int32)
        return cls(
            side,
            workload,
            tokens,
            _fresh_rows(side, extend),
            _fresh_rows(side, lens),
            tuple(side.native(lens + step + 1) for step in range(workload.decode_steps)),
            np.cumsum(lens) - 1,
        )

    def extend(self) -> Native:
        """A batch of prompts, its slots concatenated."""
        return self.side.extend(*self.rows, self.workload.extend_slots)

    def prefill(self) -> tuple[np.ndarray, Native]:
        """The rows that decode: their slots, and the last slot of each."""
        lens = self.workload.prompt_lens()
        slots = self.side.numpy(self.side.extend(*self.prompts, int(lens.sum())))
        return slots, self.side.native(slots[self.tail])

    def release(self, slots: np.ndarray) -> None:
        """Frees every page of which the first slot is among `slots`; for what is not timed.

        In parts of one length where the side can pad, since another length compiles anew.
        """
        heads = slots[slots % self.workload.page_size == 0]
        length = self.workload.extend_slots // self.workload.page_size
        if self.side.pads:
            heads = np.pad(heads, (0, -heads.size % length))
        for start in range(0, heads.size, length):
            self.side.free(self.side.native(heads[start : start + length]))


def _fresh_rows(side: Side, lens: np.ndarray) -> tuple[Native, Native, Native]:
    nothing = np.zeros_like(lens)
    return side.native(nothing), side.native(lens), side.native(nothing - 1)


@dataclass(frozen=True)
class Case:
    """One line of the table. `needs` are the methods without which a side has no such case."""

    name: str
    job: Callable[[Driver], Job]
    needs: frozenset[str] = frozenset()


def _free_case(method: str, *, first: str | None = None) -> Case:
    """A free of a whole batch, `first` called on it before and not timed."""

    def job(driver: Driver) -> Job:
        side = driver.side

        def prepare() -> Native:
            slots = driver.extend()
            if first is not None:
                getattr(side, first)(slots)
            return slots

        def finish(slots: Native, _: None) -> None:
            if "swa" in method:
                driver.release(side.numpy(slots))
            expect_all_free(driver)

        return Job(prepare, getattr(side, method), finish)

    return Case(method, job, frozenset({method}))


def _extend_job(driver: Driver) -> Job:
    def finish(_: None, slots: Native) -> None:
        driver.release(driver.side.numpy(slots))
        expect_all_free(driver)

    return Job(lambda: None, lambda _: driver.extend(), finish)


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

    return Job(driver.prefill, timed, finish, driver.workload.decode_steps)


def _group_end_job(driver: Driver) -> Job:
    side = driver.side

    def prepare() -> None:
        slots = driver.extend()
        side.group_begin()
        side.free(slots)

    return Job(prepare, lambda _: side.group_end(), lambda _, __: expect_all_free(driver))


def _turnover_case(name: str, methods: tuple[str, ...]) -> Case:
    """Extend, then `methods` on its slots, as in one step of the compiled loop."""

    def job(driver: Driver) -> Job:
        side, turns = driver.side, driver.workload.call_turns
        # The group's own two calls take no slots.
        release = [(getattr(side, method), method.startswith("free")) for method in methods]

        def timed(_: None) -> None:
            for _turn in range(turns):
                slots = driver.extend()
                for call, takes_slots in release:
                    call(slots) if takes_slots else call()

        return Job(lambda: None, timed, lambda _, __: expect_all_free(driver), turns)

    return Case(name, job, frozenset(methods))


TURNOVER_BY_SIDE = "extend + free_swa + free_full"
TURNOVER_SEGMENT = "extend + free_segment"
TURNOVER_GROUP = "extend + free in a group"

CASES = (
    Case("decode", _decode_job),
    Case("extend", _extend_job),
    _free_case("free"),
    _free_case("free_swa"),
    _free_case("free_full", first="free_swa"),
    _free_case("free_segment"),
    _free_case("free_swa_segment"),
    Case("group end", _group_end_job),
    _turnover_case(TURNOVER_BY_SIDE, ("free_swa", "free_full")),
    _turnover_case(TURNOVER_SEGMENT, ("free_segment",)),
    _turnover_case(TURNOVER_GROUP, ("group_begin", "free", "group_end")),
)


def expect_all_free(driver: Driver) -> None:
    """A repetition must leave no page behind: a leak would make the next one cheaper or fail."""
    available = driver.side.available()
    if available != (driver.tokens, driver.tokens):
        raise RuntimeError(
            f"{driver.side.name} should have all {driver.tokens} tokens free again, has {available}"
        )
