"""Small states worth a picture, made by the calls that anybody would make."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.prefix_cache import PrefixCache
from swa_jax.state import AllocatorState

_PAGE, _WINDOW = 4, 8  # tokens


@dataclass(frozen=True, eq=False)
class Moment:
    """A state, who holds what in it, and what has just happened."""

    state: AllocatorState
    owners: dict[str, np.ndarray]  # int32[T] full slots
    caption: str


def two_pools() -> Moment:
    """Four requests: one behind its window, two that began as one text, one that is being freed."""
    config = swa.PoolConfig(23 * _PAGE, 15 * _PAGE, _PAGE, _WINDOW)
    state, evicted = swa.init(config), jnp.zeros(4, jnp.int32)
    table, lengths = np.zeros((4, 7 * _PAGE), np.int32), np.zeros(4, np.int32)

    def extend(row: int, length: int) -> None:
        nonlocal state, evicted
        held = lengths[row]
        last = table[row, held - 1] if held else -1
        state, grant = swa.alloc_extend(state, [held], [length], [last], capacity=28)
        assert grant.ok
        table[row, held:length], lengths[row] = grant.slots[: length - held], length
        state, evicted = swa.free_out_of_window(state, table, lengths, evicted)

    for row, length in ((0, 10), (1, 16), (3, 9), (0, 26)):
        extend(row, length)
    state = swa.share(state, table[1])  # C goes on from B's text
    table[2], lengths[2], evicted = table[1], 16, evicted.at[2].set(evicted[1], mode="drop")
    extend(1, 21)
    extend(2, 22)
    state = swa.free(swa.free_group_begin(state), table[3])
    names = ("request A", "request B", "its fork C")
    return Moment(state, {name: table[row] for row, name in enumerate(names)}, "")


def moving_window(steps: int = 24, page_size: int = _PAGE, window: int = _WINDOW) -> list[Moment]:
    """Requests that decode: one ends on the way, and another gets its pages.

    Args:
      steps: tokens that the longest one decodes.
      page_size: tokens in a page.
      window: W, tokens.

    Raises:
      ValueError: sizes that cannot work.
    """
    for name, value in (("steps", steps), ("page_size", page_size), ("window", window)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return list(_moments(steps, page_size, window))


def _moments(steps: int, page: int, window: int) -> Iterator[Moment]:
    ends, begins = steps // 2, steps // 2 + 2  # when B is done, and when C comes
    prompts = (2 * page + page // 2, page + page // 2 + 1, 3 * page)
    longest = prompts[0] + steps
    pages = sum(-(-tokens // page) + 1 for tokens in (longest, prompts[1] + ends, steps // 2))
    of_window = -(-window // page) + 1
    of_swa = 2 * max(of_window, prompts[2] // page) + 2
    config = swa.PoolConfig(pages * page, min(of_swa, pages) * page, page, window)
    state, names = swa.init(config), ("request A", "request B", "request C")
    # As wide as any row gets: a frontier past the table would be refused.
    table = np.zeros((3, -(-(longest + prompts[2]) // page) * page), np.int32)
    lengths, evicted = np.zeros(3, np.int32), jnp.zeros(3, jnp.int32)

    def moment(caption: str) -> Moment:
        owners = {names[row]: table[row, : lengths[row]].copy() for row in range(3)}
        return Moment(state, owners, caption)

    for row in (0, 1):
        state = _prefill(state, table, lengths, row, prompts[row])
    yield moment("A and B have prefilled their prompts")
    for step in range(1, steps + 1):
        if step == ends:
            state, lengths[1] = swa.free(state, table[1]), 0
            yield moment("B is done and frees its pages")
        if step == begins:
            state = _prefill(state, table, lengths, 2, prompts[2])
            yield moment("C prefills its prompt")
        active = lengths > 0
        last = table[np.arange(3), np.maximum(lengths - 1, 0)]
        state, grant = swa.alloc_decode(state, lengths + active, last, active)
        if not grant.ok:
            raise ValueError(f"{steps} steps do not fit the example's pools")
        table[np.flatnonzero(active), lengths[active]] = np.asarray(grant.slots)[active]
        lengths = lengths + active.astype(np.int32)
        state, now = swa.free_out_of_window(state, table, lengths, evicted, active=active)
        left = int(np.sum(np.asarray(now) - np.asarray(evicted))) // page
        evicted = now
        who = " and ".join(names[row][-1] for row in np.flatnonzero(active))
        caption = f"step {step}: {who} decode{'s' if active.sum() == 1 else ''} a token"
        if left:
            caption += f"; {left} SWA page{'s' if left > 1 else ''} left a window"
        yield moment(caption)


def _prefill(
    state: AllocatorState, table: np.ndarray, lengths: np.ndarray, row: int, tokens: int
) -> AllocatorState:
    """Grants a prompt to a row; `table` and `lengths` are written."""
    state, grant = swa.alloc_extend(state, [0], [tokens], [-1], capacity=table.shape[1])
    assert grant.ok
    table[row, :tokens] = np.asarray(grant.slots)[:tokens]
    lengths[row] = tokens
    return state


def small_tree() -> tuple[AllocatorState, PrefixCache]:
    """Four prompts of two beginnings, some behind their windows, one in use."""
    config = swa.PoolConfig(40 * _PAGE, 32 * _PAGE, _PAGE, _WINDOW)
    state, cache = swa.init(config), prefix_cache.init(config)
    common, other = np.arange(100, 120), np.arange(300, 312)
    prompts = [
        np.concatenate([common, np.arange(20)]),
        np.concatenate([common, np.arange(40, 56)]),
        np.concatenate([common[:8], np.arange(60, 72)]),
        np.concatenate([other, np.arange(80, 88)]),
    ]
    node = None
    for prompt in prompts:
        tokens = np.zeros(40, np.int32)
        tokens[: prompt.size] = prompt
        # What the tree has already is granted once more here, and freed by the insert.
        state, grant = swa.alloc_extend(state, [0], [prompt.size], [-1], capacity=40)
        cache, state, found = prefix_cache.insert(cache, state, tokens, prompt.size, grant.slots)
        node = found.node if node is None else node
    assert node is not None
    cache, _ = prefix_cache.lock(cache, state, node)
    cache, state, _ = prefix_cache.evict(cache, state, full_tokens=0, swa_tokens=8 * _PAGE)
    return state, cache
