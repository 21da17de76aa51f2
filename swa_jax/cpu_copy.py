"""The KV of one request in host memory, while its pages serve others, and back in other pages.

A copy is by token, so it may come back at any slots, also of pools of another page size.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.inputs import Ints, as_int32, whole_number
from swa_jax.kv_layers import check_layers
from swa_jax.kv_rows import read_rows, write_rows
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.paging import look_up
from swa_jax.pool import is_held
from swa_jax.state import PAD_PAGE, PAD_SLOT, UNMAPPED, AllocatorState


@dataclass(frozen=True)
class CpuCopy:
    """KV of the first `length` tokens of a request, NumPy arrays in the layers' dtypes.

    The layers are those of a `KVPool`, in its order.
    """

    length: int  # tokens
    swa_start: int  # tokens: SWA layers have what comes from here on
    full: tuple[np.ndarray, ...]  # [length, ...] by full layer
    swa: tuple[np.ndarray, ...]  # [length - swa_start, ...] by SWA layer

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(layer.nbytes for layer in self.full + self.swa)


def get_cpu_copy(
    state: AllocatorState, pools: KVPool, table: Ints, length: int, *, swa_from: int = 0
) -> CpuCopy:
    """Copies a request's KV to the host. Waits for the device.

    Args:
      state: the allocator; nothing of it changes.
      pools: KV by slot.
      table: int32[C] first full slot of each of the request's pages, in order.
      length: tokens whose KV is held.
      swa_from: tokens: what comes before needs no SWA copy, live or not. A caller that knows the
        window gives `swa_jax.window.frontier`.

    Returns:
      Every token of full layers. Of SWA layers the tokens from `swa_from` on, or from behind the
      last page without an SWA side, where that is later: what lies before a hole is out of every
      window.

    Raises:
      ValueError: KV that is not the allocator's, a length that the table has no pages for, a page
        of it that is not held, or one that is there twice; a pool with request rings.
    """
    state.config.needs_mapping("get_cpu_copy")
    check_layers(state.config, pools)
    firsts, count = _arguments(state, table, length)
    start = whole_number("swa_from", swa_from, 0)
    size = state.config.page_size
    found = jax.device_get(_look(state, firsts, jnp.int32(count)))
    _check_pages(found, size)
    live = int(found.live_from)
    start = min(max(start // size, live) * size, count)
    full_slots, swa_slots = _slots(state, firsts, jnp.int32(0), jnp.int32(start), jnp.int32(count))
    full, swa = jax.device_get(_read(pools, full_slots, swa_slots))
    return CpuCopy(
        length=count,
        swa_start=start,
        full=tuple(np.array(layer[:count]) for layer in full),
        swa=tuple(np.array(layer[start:count]) for layer in swa),
    )


def load_cpu_copy(
    state: AllocatorState, pools: KVPool, table: Ints, copy: CpuCopy, *, start: int = 0
) -> KVPool:
    """Writes a copy into the pages that the request has now.

    Args:
      state: the allocator, after it granted the pages: SWA from `copy.swa_start` on at the least,
        as `alloc_extend_swa_tail` with a tail of `copy.length - copy.swa_start` does.
      pools: KV by slot; taken over: go on with what comes back.
      table: int32[C] first full slot of each of the request's pages, in order.
      copy: of `get_cpu_copy`.
      start: tokens that are in their pages already, because they are shared with others: these are
        not written.

    Returns:
      The pools, with the KV of tokens `start` .. `copy.length` bit for bit as it was copied.

    Raises:
      ValueError: KV that is not the allocator's, or a copy that does not fit: other layers, more
        tokens than the table has pages, a page that is not held or is there twice, or one without
        the SWA side that the copy has; a pool with request rings. Nothing is written.
    """
    state.config.needs_mapping("load_cpu_copy")
    firsts, count = _arguments(state, table, copy.length)
    begin = whole_number("start", start, 0, count)
    check_layers(state.config, pools)
    _check_copy(pools, copy)
    found = jax.device_get(_look(state, firsts, jnp.int32(count)))
    size = state.config.page_size
    _check_pages(found, size)
    swa_start = max(copy.swa_start, begin)
    if swa_start < count and found.live_from * size > swa_start:
        raise ValueError(
            f"the copy has SWA layers from token {copy.swa_start} on, and the pages it shall go to "
            f"have an SWA side from token {found.live_from * size} on: grant a tail of "
            f"{count - copy.swa_start} tokens"
        )
    room = firsts.shape[0] * size
    full = tuple(_padded(layer, 0, room) for layer in copy.full)
    swa = tuple(_padded(layer, copy.swa_start, room) for layer in copy.swa)
    slots = _slots(state, firsts, jnp.int32(begin), jnp.int32(swa_start), jnp.int32(count))
    return _write(pools, *slots, full, swa)


def _arguments(state: AllocatorState, table: Ints, length: int) -> tuple[jax.Array, int]:
    """int32[C'] the table cut to the next power of two of the pages in use, and the length."""
    firsts = as_int32("table", table, 1)
    size = state.config.page_size
    count = whole_number("length", length, 0)
    pages = -(-count // size)
    if pages > firsts.shape[0]:
        raise ValueError(
            f"table must have {pages} pages of {size} for {count} tokens, got {firsts.shape[0]}"
        )
    width = 1 << max(pages - 1, 0).bit_length()  # few widths: each is compiled once
    return jnp.pad(firsts[:width], (0, max(width - firsts.shape[0], 0))), count


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["held", "page", "live_from"], meta_fields=[]
)
@dataclass(frozen=True)
class _Found:
    """What the allocator says of the pages."""

    held: jax.Array  # bool[C] unused places count as held
    page: jax.Array  # int32[C] 0 in unused places
    live_from: jax.Array  # int32[] pages: all from here on have an SWA side


@jax.jit
def _look(state: AllocatorState, firsts: jax.Array, length: jax.Array) -> _Found:
    size = jnp.int32(state.config.page_size)
    place = jnp.arange(firsts.shape[0], dtype=jnp.int32)
    used = place * size < length
    page = _pages(state, firsts)
    misplaced = jax.lax.rem(firsts, size) != 0
    held = (page > PAD_PAGE) & ~misplaced & is_held(state.full, page)
    dead = used & (look_up(state.full_to_swa, page, UNMAPPED) == UNMAPPED)
    return _Found(
        held=held | ~used,
        page=jnp.where(used, page, PAD_PAGE),
        live_from=jnp.max(jnp.where(dead, place + 1, 0), initial=0),
    )


def _pages(state: AllocatorState, firsts: jax.Array) -> jax.Array:
    return jax.lax.div(jnp.maximum(firsts, PAD_SLOT), jnp.int32(state.config.page_size))


@jax.jit
def _slots(
    state: AllocatorState,
    firsts: jax.Array,
    full_from: jax.Array,
    swa_from: jax.Array,
    length: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """int32[C * P] full and SWA slots of each token from a place on, 0 where there is none."""
    size = state.config.page_size
    token = jnp.arange(firsts.shape[0] * size, dtype=jnp.int32)
    offset = jax.lax.rem(token, jnp.int32(size))
    page = jnp.repeat(_pages(state, firsts), size)
    swa_page = look_up(state.full_to_swa, page, UNMAPPED)
    full = jnp.where((token >= full_from) & (token < length), page * size + offset, PAD_SLOT)
    swa = jnp.where((token >= swa_from) & (token < length), swa_page * size + offset, PAD_SLOT)
    return full, swa


@jax.jit
def _read(
    pools: KVPool, full_slots: jax.Array, swa_slots: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    return read_rows(pools.full, full_slots), read_rows(pools.swa, swa_slots)


@functools.partial(jax.jit, donate_argnums=0)
def _write(
    pools: KVPool,
    full_slots: jax.Array,
    swa_slots: jax.Array,
    full: tuple[jax.Array, ...],
    swa: tuple[jax.Array, ...],
) -> KVPool:
    return KVPool(
        full=write_rows(pools.full, full_slots, full), swa=write_rows(pools.swa, swa_slots, swa)
    )


def _padded(layer: np.ndarray, before: int, room: int) -> np.ndarray:
    """[room, ...] the layer's rows from place `before` on, zeros around them."""
    rows = np.zeros((room, *layer.shape[1:]), layer.dtype)
    rows[before : before + layer.shape[0]] = layer
    return rows


def _check_pages(found: _Found, size: int) -> None:
    held = np.asarray(found.held)
    if not held.all():
        page = int(np.argmin(held))
        raise ValueError(
            f"every page of the table must be held, and the one of tokens {page * size} .. "
            f"{page * size + size - 1} is not"
        )
    pages, times = np.unique(np.asarray(found.page), return_counts=True)
    twice = pages[(times > 1) & (pages > PAD_PAGE)]
    if twice.size:
        raise ValueError(
            f"every page of the table must be there once, and page {twice[0]} is twice"
        )


def _check_copy(pools: KVPool, copy: CpuCopy) -> None:
    for name, layers, rows in (("full", pools.full, copy.full), ("swa", pools.swa, copy.swa)):
        wanted = [(np.dtype(layer.dtype).name, layer.shape[2:]) for layer in layers]
        seen = [(row.dtype.name, row.shape[1:]) for row in rows]
        if wanted != seen:
            raise ValueError(
                f"the {name} layers keep {wanted} for a token, and the copy has {seen}: it is of "
                "another model"
            )
    start = whole_number("copy.swa_start", copy.swa_start, 0, copy.length)
    for name, rows, count in (
        ("full", copy.full, copy.length),
        ("swa", copy.swa, copy.length - start),
    ):
        if any(row.shape[0] != count for row in rows):
            raise ValueError(
                f"the copy must have {count} tokens in {name} layers, got "
                f"{[row.shape[0] for row in rows]}"
            )
