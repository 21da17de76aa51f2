"""The same calls on every allocator must have the same effect, before any of them is timed.

Which page a token gets is each allocator's own affair. What must agree: the offset of every slot
in its page, how many pages a call touches, and what both pools have left after each call.
"""

import zlib
from typing import TypeAlias

import numpy as np

from benchmarks.cases import Driver
from benchmarks.side import Native

Effect: TypeAlias = dict[str, list[int]]


def effects(driver: Driver) -> Effect:
    """What every call did, by name; the pools are full again afterwards."""
    seen: Effect = {}
    side, page_size = driver.side, driver.workload.page_size

    def note(name: str, slots: np.ndarray | None = None) -> None:
        seen[name] = [*side.available()]
        if slots is not None:
            offsets = np.ascontiguousarray(slots % page_size, np.int32)
            pages = np.unique(slots // page_size)
            seen[name] += [slots.size, pages.size, zlib.crc32(offsets.tobytes())]
            if pages[0] < 1 or pages[-1] > driver.tokens // page_size:
                raise RuntimeError(f"{side.name}: {name} granted a page outside the pool")
            if np.unique(slots).size != slots.size:
                raise RuntimeError(f"{side.name}: {name} granted a slot twice")

    note("fresh")
    _decode_effects(driver, note)
    for method in ("free", "free_segment"):
        if method not in side.lacks:
            slots = driver.extend()
            note(f"extend for {method}", side.numpy(slots))
            getattr(side, method)(slots)
            note(method)
    for method in ("free_swa", "free_swa_segment"):
        if method not in side.lacks:
            slots = driver.extend()
            getattr(side, method)(slots)
            note(method)
            side.free_full(slots)
            note(f"free_full after {method}")
    slots = driver.extend()
    side.group_begin()
    side.free(slots)
    note("free in a group")
    side.group_end()
    note("group end")
    return seen


def _decode_effects(driver: Driver, note: Native) -> None:
    side = driver.side
    prompt, last = driver.prefill()
    note("prefill", prompt)
    everything = [prompt]
    for step in range(driver.workload.page_size + 1):  # every row opens a page at least once
        last = side.decode(driver.decode_lens[step], last)
        everything.append(side.numpy(last))
        note(f"decode step {step}", everything[-1])
    note("all decoded", np.concatenate(everything))
    driver.release(np.concatenate(everything))
    note("free of the decoded")


def check_agreement(drivers: list[Driver]) -> int:
    """Compares with the first driver.

    Returns:
      How many effects were compared.

    Raises:
      RuntimeError: two allocators did different things; names the call and both.
    """
    expected = effects(drivers[0])
    compared = 0
    for driver in drivers[1:]:
        for name, effect in effects(driver).items():
            compared += 1
            if effect != expected[name]:
                raise RuntimeError(
                    f"{driver.side.name} differs after {name}: {effect}, "
                    f"where {drivers[0].side.name} has {expected[name]}"
                )
    return compared


def shuffle_pools(driver: Driver) -> None:
    """Leaves the free pages in mixed order, as in a pool that has been in use.

    Three batches at most, given back in a random order of pages.
    """
    side, rng = driver.side, np.random.default_rng(0)
    batches = min(3, driver.tokens // driver.workload.extend_slots)
    granted = [side.numpy(driver.extend()) for _ in range(batches)]
    slots = np.concatenate(granted)
    driver.release(rng.permutation(slots))
