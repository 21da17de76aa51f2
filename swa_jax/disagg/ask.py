"""What a decode side asks a prefill side for, cut into pieces, and what that side must keep."""

import functools
import math
from dataclasses import dataclass

import jax

from swa_jax.config import PoolConfig
from swa_jax.inputs import whole_number


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["place", "serial"], meta_fields=[]
)
@dataclass(frozen=True)
class Ticket:
    """The name of a reservation: good until it is committed or aborted, and then never again."""

    place: jax.Array  # int32[] in the inbox, -1 in a ticket that names nothing
    serial: jax.Array  # int32[] of this reservation alone, 0 in a ticket that names nothing


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["full_start", "swa_start", "length", "ticket"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Ask:
    """The KV that is lacking: full layers of tokens [full_start, length), SWA from swa_start on."""

    full_start: jax.Array  # int32[] tokens
    swa_start: jax.Array  # int32[] tokens, on a page boundary of the decode side
    length: jax.Array  # int32[] tokens
    ticket: Ticket


def pieces(ask: Ask, full_capacity: int, swa_capacity: int) -> list[tuple[int, int]]:
    """Where each piece of an answer begins. On the host: waits for the device.

    Args:
      ask: what is asked for.
      full_capacity: tokens of full layers in a piece.
      swa_capacity: tokens of SWA layers in a piece.

    Returns:
      (full_from, swa_from) for `pack`, in the order in which they are to be sent. Empty where
      nothing is lacking.

    Raises:
      ValueError: a capacity below 1.
    """
    full_room = whole_number("full_capacity", full_capacity, 1)
    swa_room = whole_number("swa_capacity", swa_capacity, 1)
    full_start, swa_start, length = (
        int(value) for value in jax.device_get((ask.full_start, ask.swa_start, ask.length))
    )
    full, swa = max(0, length - full_start), max(0, length - swa_start)
    count = max(-(-full // full_room), -(-swa // swa_room))
    return [
        (min(full_start + i * full_room, length), min(swa_start + i * swa_room, length))
        for i in range(count)
    ]


def prefill_window(
    pool: PoolConfig, decode: PoolConfig, key_lag: int, *, keeps_boundary: bool = True
) -> int | None:
    """The window that a prefill side must keep for a decode side to be able to ask for its own.

    A decode side with pages of P tokens asks for SWA from floor_P(n - key_lag) - ceil_P(W) on at
    the lowest. A prefill side with pages of Q tokens and a cache that keeps V past tokens has
    SWA from floor_Q(n) - ceil_Q(V) on at the latest: its own cache may have had all of n, also
    where keys lag. Of all n the worst one ends with a page of Q tokens and as late as can be in a
    page of P tokens: P - gcd(P, Q) tokens after its start or, where keys lag, with it. Without a
    cache that side has SWA from floor_Q(n - V) on.

    Args:
      pool: of the prefill side; its page and the shape of its window count, not its width.
      decode: of the decode side.
      key_lag: 1 for bigram keys, else 0; the same on both sides.
      keeps_boundary: the prefill side has a prefix cache, and so keeps what the last window of
        an insert needs.

    Returns:
      The least `sliding_window` for the prefill side's pool: W where pages are equal and keys do
      not lag. None where the decode side has no window: then nothing may leave on the prefill
      side either.

    Raises:
      ValueError: windows of different shapes, or chunks where no window would do.

    Rule R8; public report B54.
    """
    lag = whole_number("key_lag", key_lag, 0, 1)
    window, page, own = decode.sliding_window, decode.page_size, pool.page_size
    if window is None:
        return None
    if pool.sliding_window is not None and pool.chunked != decode.chunked:
        raise ValueError(
            "both sides must have windows of one shape, got "
            f"chunked={pool.chunked} on the prefill side and {decode.chunked} on the decode side"
        )
    if decode.chunked:
        return _chunk(window, page, own, lag, keeps_boundary=keeps_boundary)
    reach = -(-window // page) * page
    latest = page - math.gcd(page, own)
    if keeps_boundary:
        reach += page if lag else latest
        return max(window, (reach - 1) // own * own + 1)
    return reach + latest + lag


def _chunk(window: int, page: int, own: int, lag: int, *, keeps_boundary: bool) -> int:
    """A chunk cannot be kept longer by making it wider: what fits must fit as it is."""
    if lag or not keeps_boundary or own % page:
        raise ValueError(
            "with chunks the prefill side must have a prefix cache (keeps_boundary=True), keys "
            f"that do not lag (key_lag=0) and a page that is a multiple of the decode side's {page}"
            f", got keeps_boundary={keeps_boundary}, key_lag={lag} and a page of {own}"
        )
    return window
