"""Every transition with the bytes that it must touch at least: what `limits` measures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

import swa_jax as swa
from swa_jax import prefix_cache

Given: TypeAlias = Any  # a state, a cache, a receipt, an array: whatever the transition takes

LEGEND = (
    "B rows, T slots or tokens, N pages that they name or take, P tokens in a page, F and S pages "
    "of the pools. Counted once each: every input and output (4 bytes, a bool 1), every entry of a "
    "table that the result depends on and every entry that changes. A page that is granted changes "
    "a count of holders on both sides and its mapping, and is read from two rings (20 bytes); one "
    "that is freed is read and written in the three and goes into two rings (32); of a last page "
    "its count and its mapping are read (8)."
)


@dataclass(frozen=True)
class Limit:
    """A transition, its arguments, and a bound from below.

    Attributes:
      name: as it is called.
      call: (*donated, *arguments) to new states and results.
      arguments: int32 arrays of zeros; their values change nothing here.
      formula: bytes that it must touch, in the letters of `LEGEND`.
      must: its value.
      on_cache: a prefix cache is donated as well as the state.
      whole: reads or writes a table as long as the pool, and says so in its docstring.
    """

    name: str
    call: Callable[..., Any]
    arguments: tuple[jax.Array, ...]
    formula: str
    must: int
    on_cache: bool = False
    whole: bool = False


def limits_of(config: swa.PoolConfig, rows: int, slots: int) -> list[Limit]:
    """All of them, for batches of `rows` rows and `slots` slots."""
    return [
        *grants(config, rows, slots),
        *frees(config, rows, slots),
        *mappings(config, slots),
        *cached(config, slots),
    ]


def _zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def grants(config: swa.PoolConfig, rows: int, slots: int) -> list[Limit]:
    """Transitions that hand pages out."""
    row = _zeros(rows)
    b, t, p = rows, slots, config.page_size
    n = t // p

    def alloc(state: Given, count: Given) -> Given:
        return swa.alloc(state, count, capacity=slots)

    def extend(state: Given, *columns: Given) -> Given:
        return swa.alloc_extend(state, *columns, capacity=slots)

    def tail(state: Given, *columns: Given) -> Given:
        return swa.alloc_extend_swa_tail(state, *columns, capacity=slots)

    return [
        Limit("alloc", alloc, (_zeros(),), "4T + 20N", 4 * t + 20 * n),
        Limit("alloc_extend", extend, (row,) * 3, "20B + 4T + 20N", 20 * b + 4 * t + 20 * n),
        Limit("alloc_extend_swa_tail", tail, (row,) * 4, "24B + 4T + 20N", 24 * b + 4 * t + 20 * n),
        Limit("alloc_decode", swa.alloc_decode, (row, row), "41B", 41 * b),
        Limit("share", swa.share, (_zeros(slots),), "4T + 20N", 4 * t + 20 * n),
        Limit("copy_on_write", swa.copy_on_write, (row, row), "52B + 8BP", 52 * b + 8 * b * p),
    ]


def frees(config: swa.PoolConfig, rows: int, slots: int) -> list[Limit]:
    """Transitions that take pages back."""
    row, named = _zeros(rows), _zeros(slots)
    b, t, n = rows, slots, slots // config.page_size
    table = _zeros(rows, 64)

    def leave(state: Given, *columns: Given) -> Given:
        return swa.free_out_of_window(state, *columns, max_pages=2)

    return [
        Limit("free", swa.free, (named,), "4T + 32N", 4 * t + 32 * n),
        Limit("free_swa", swa.free_swa, (named,), "4T + 24N", 4 * t + 24 * n),
        Limit("free_full", swa.free_full, (named,), "4T + 20N", 4 * t + 20 * n),
        Limit("free_segment", swa.free_segment, (named,), "36N", 36 * n),
        Limit("free_swa_segment", swa.free_swa_segment, (named,), "28N", 28 * n),
        Limit("free_swa_grouped", swa.free_swa_grouped, (named,), "4T + 24N", 4 * t + 24 * n),
        Limit("free_group_begin", swa.free_group_begin, (), "1", 1),
        Limit("free_group_end", swa.free_group_end, (), "25", 25),
        Limit("free_out_of_window", leave, (table, row, row), "12B + 2 * 28B", 68 * b),
    ]


def mappings(config: swa.PoolConfig, slots: int) -> list[Limit]:
    """The mapping itself, and a new start."""
    named = _zeros(slots)
    t, n = slots, slots // config.page_size
    full, of_swa = config.full_pages, config.swa_pages

    def translate(state: Given, named: Given) -> Given:
        return state, swa.translate_full_to_swa(state, named)

    setting = swa.set_full_to_swa_mapping
    return [
        Limit(
            "set_full_to_swa_mapping",
            setting,
            (named, named),
            "8T + 16N + 4F",
            8 * t + 16 * n + 4 * full,
            whole=True,
        ),
        Limit(
            "clear_full_to_swa_mapping",
            swa.clear_full_to_swa_mapping,
            (named,),
            "4T + 8N",
            4 * t + 8 * n,
        ),
        Limit("translate_full_to_swa", translate, (named,), "8T + 4N", 8 * t + 4 * n),
        Limit("clear", swa.clear, (), "16F + 8S", 16 * full + 8 * of_swa, whole=True),
    ]


def cached(config: swa.PoolConfig, slots: int) -> list[Limit]:
    """The prefix cache's, whose nodes are pages. Of a loop `cost_analysis` counts one turn.

    A node on a path is found by its hash, compared by parent, depth, namespace and tokens, and its
    mapping is read (20 bytes and its tokens); a new one has as much written.
    """
    tokens, number = _zeros(slots), _zeros()
    t, n = slots, slots // config.page_size
    nothing = prefix_cache.no_receipt()

    def match(cache: Given, state: Given, *arguments: Given) -> Given:
        cache, found = prefix_cache.match_prefix(cache, state, *arguments)
        return cache, state, found

    def lock(cache: Given, state: Given, node: Given) -> Given:
        cache, receipt = prefix_cache.lock(cache, state, node)
        return cache, state, receipt

    def unlock(cache: Given, state: Given, *parts: Given) -> Given:
        receipt = jax.tree.unflatten(jax.tree.structure(nothing), parts)
        return prefix_cache.unlock(cache, receipt), state

    def evict(cache: Given, state: Given, full: Given, of_swa: Given) -> Given:
        return prefix_cache.evict(cache, state, full_tokens=full, swa_tokens=of_swa)

    insert, on, receipt = prefix_cache.insert, True, tuple(jax.tree.leaves(nothing))
    most = config.full_pages
    return [
        Limit("match_prefix", match, (tokens, number), "12T + 24N", 12 * t + 24 * n, on),
        Limit("insert", insert, (tokens, number, tokens), "12T + 48N", 12 * t + 48 * n, on),
        Limit("lock", lock, (number,), "16N", 16 * n, on),
        Limit("unlock", unlock, receipt, "16N", 16 * n, on),
        Limit("evict", evict, (number, number), "20F", 20 * most, on, whole=True),
    ]
