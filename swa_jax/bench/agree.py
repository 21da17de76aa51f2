"""The same calls on every allocator must have the same effect, before any of them is timed.

Which page a token gets is each allocator's own affair. What must agree: the offset of every slot
in its page, how many pages a call touches, and what both pools have left after each call.
"""

import zlib
from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np

from swa_jax.bench import cases
from swa_jax.bench.cases import Driver
from swa_jax.bench.side import Native

Effect: TypeAlias = dict[str, list[int]]
_STEPS = 33  # decode steps that are compared: with pages of up to 32, every row opens one


def effects(driver: Driver, timed: Collection[str]) -> Effect:
    """What the calls of these cases did, by name; the pools are full again afterwards."""
    seen: Effect = {}
    side, page_size = driver.side, driver.point.page_size

    def note(name: str, slots: np.ndarray | None = None) -> None:
        seen[name] = [*side.available()]
        if slots is not None:
            offsets = np.ascontiguousarray(slots % page_size, np.int32)
            pages = np.unique(slots // page_size)
            seen[name] += [slots.size, pages.size, zlib.crc32(offsets.tobytes())]
            if pages[0] < 1 or pages[-1] > side.last_page:
                raise RuntimeError(f"{side.name}: {name} granted a page outside the pool")
            if np.unique(slots).size != slots.size:
                raise RuntimeError(f"{side.name}: {name} granted a slot twice")

    note("fresh")
    if cases.DECODE.name in timed and "decode" not in side.lacks:
        _decode_effects(driver, note)
    if cases.EXTEND.name in timed:
        slots = side.numpy(driver.extend())
        note("extend", slots)
        driver.release(slots)
        note("free of the extended")
    if cases.TAIL_EXTEND.name in timed and "extend_tail" not in side.lacks:
        slots = side.numpy(driver.extend_tail())
        note("tail extend", slots)
        driver.release(slots)
        note("free of a tail")
    for method in ("free", "free_segment", "free_swa", "free_swa_segment"):
        if method in timed and method not in side.lacks:
            _free_effects(driver, method, note)
    if cases.GROUP_END.name in timed and "group_end" not in side.lacks:
        slots = driver.in_any_order(driver.extend())
        side.group_begin()
        side.free(slots)
        note("free in a group")
        side.group_end()
        note("group end")
    return seen


def _free_effects(driver: Driver, method: str, note: Native) -> None:
    """A free, and the full side after it where it was the SWA side's."""
    side, slots = driver.side, driver.extend()
    any_order = slots if "segment" in method else driver.in_any_order(slots)
    getattr(side, method)(any_order)
    note(method)
    if "swa" in method:
        if "free_full" in side.lacks:
            side.free_segment(slots)
        else:
            side.free_full(any_order)
        note(f"full side after {method}")


def _decode_effects(driver: Driver, note: Native) -> None:
    side = driver.side
    prompt, last = driver.prefill()
    note("prefill", prompt)
    everything = [prompt]
    for step, lens in enumerate(driver.decode_lens[:_STEPS]):
        last = side.decode(lens, last)
        everything.append(side.numpy(last))
        note(f"decode step {step}", everything[-1])
    note("all decoded", np.concatenate(everything))
    driver.release(np.concatenate(everything))
    note("free of the decoded")


def check_agreement(drivers: Sequence[Driver], timed: Collection[str]) -> int:
    """Compares with the first driver, in what the two have.

    Args:
      drivers: at one point, each with a full pool.
      timed: names of the cases that are timed there.

    Returns:
      How many effects were compared.

    Raises:
      RuntimeError: two allocators did different things; names the call and both.
    """
    expected = effects(drivers[0], timed)
    compared = 0
    for driver in drivers[1:]:
        for name, effect in effects(driver, timed).items():
            compared += 1
            if effect != expected[name]:
                raise RuntimeError(
                    f"{driver.side.name} differs after {name}: {effect}, "
                    f"where {drivers[0].side.name} has {expected[name]}"
                )
    return compared


def shuffle_pool(driver: Driver) -> None:
    """Leaves the free pages in mixed order, as in a pool that has long been in use.

    All pages are granted, and given back in a random order; or all of a request together, where
    an allocator frees by request.
    """
    if "shuffle" in driver.side.lacks:
        return
    side, size = driver.side, driver.point.page_size
    heads = []
    for _ in range(driver.point.pool_tokens // driver.point.slots):
        slots = side.numpy(driver.extend())
        heads.append(slots[slots % size == 0])
    side.give_back(np.random.default_rng(0).permutation(np.concatenate(heads)))
    if driver.side.available() != (driver.point.pool_tokens,) * 2:
        raise RuntimeError(f"{side.name} lost pages when they were shuffled")
