"""Many requests in one program: what the shells on the host call. B requests or pieces at a time.

Worlds and arrivals are taken over (donated): go on with what comes back.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.disagg.ask import Ask, Ticket
from swa_jax.disagg.decode_side import NOT_YET, Arrivals, deliver, give_up, reserve, seat
from swa_jax.disagg.inbox import NO_RESERVATION
from swa_jax.disagg.jobs import padded
from swa_jax.disagg.preallocate import Reserved
from swa_jax.disagg.prefill_side import Parcel, pack_request
from swa_jax.inputs import whole_number
from swa_jax.only_if import only_if
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.model import ServingModel
from swa_jax.serving.requests import Requests
from swa_jax.serving.world import World


@dataclass(frozen=True)
class BundleSize:
    """How much travels at once; both sides must have the same. Each size is a program.

    Args:
      pieces: B, pieces in a bundle, and requests that a shell handles in one call.
      full_tokens: tokens of full layers in a piece.
      swa_tokens: tokens of SWA layers in a piece.

    Raises:
      ValueError: a number below 1.
    """

    pieces: int = 8
    full_tokens: int = 256
    swa_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("pieces", "full_tokens", "swa_tokens"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))


class HostAsk(NamedTuple):
    """An `Ask` as numbers, to be sent."""

    place: int
    serial: int
    full_start: int
    swa_start: int
    length: int

    @property
    def ticket(self) -> tuple[int, int]:
        """Which reservation it is for."""
        return self.place, self.serial


class HostPiece(NamedTuple):
    """A piece that is wanted."""

    place: int  # of the request in the prefill side's queue
    ask: HostAsk
    full_from: int
    swa_from: int


NO_ASK = HostAsk(-1, 0, 0, 0, 0)


def host_pieces(ask: HostAsk, size: BundleSize) -> list[tuple[int, int]]:
    """(full_from, swa_from) of every piece, as `pieces` has it; for an ask in numbers."""
    full, swa = ask.length - ask.full_start, ask.length - ask.swa_start
    count = max(-(-full // size.full_tokens), -(-swa // size.swa_tokens), 0)
    return [
        (
            min(ask.full_start + index * size.full_tokens, ask.length),
            min(ask.swa_start + index * size.swa_tokens, ask.length),
        )
        for index in range(count)
    ]


def _asks(asks: Sequence[HostAsk], count: int) -> Ask:
    place, serial, full_start, swa_start, length = (
        padded([ask[part] for ask in asks], count, NO_ASK[part]) for part in range(5)
    )
    return Ask(full_start, swa_start, length, Ticket(place, serial))


def tickets_of(asks: Sequence[HostAsk], count: int) -> Ticket:
    """Ticket [count] of the asks, then such as name nothing."""
    return _asks(asks, count).ticket


def is_for(bundle: Parcel, asks: Sequence[HostAsk | None]) -> bool:
    """Whether each piece is for the reservation that is said to be its own.

    A piece that the prefill side refused is for none.

    Args:
      bundle: Parcel [B].
      asks: of its first pieces; None stands for any reservation, as of a job that is over.
    """
    ticket = bundle.piece.ticket
    seen = np.stack(jax.device_get([bundle.piece.ok, ticket.place, ticket.serial]), axis=1)
    return all(
        ask is None or not ok or ask.ticket == (place, serial)
        for ask, (ok, place, serial) in zip(asks, seen.tolist(), strict=False)
    )


def pack_bundle(
    model: ServingModel,
    config: ServingConfig,
    size: BundleSize,
    world: World,
    wanted: Sequence[HostPiece],
) -> Parcel:
    """Parcel [B] of at most B pieces; the rest are refused and carry nothing."""
    count = size.pieces
    return _pack(
        model,
        config,
        size,
        world,
        padded([piece.place for piece in wanted], count, -1),
        _asks([piece.ask for piece in wanted], count),
        padded([piece.full_from for piece in wanted], count, 0),
        padded([piece.swa_from for piece in wanted], count, 0),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pack(
    model: ServingModel,
    config: ServingConfig,
    size: BundleSize,
    world: World,
    places: jax.Array,
    asks: Ask,
    full_from: jax.Array,
    swa_from: jax.Array,
) -> Parcel:
    def one(place: jax.Array, ask: Ask, full_from: jax.Array, swa_from: jax.Array) -> Parcel:
        return pack_request(
            model,
            config,
            world,
            place,
            ask,
            full_capacity=size.full_tokens,
            swa_capacity=size.swa_tokens,
            full_from=full_from,
            swa_from=swa_from,
        )

    return jax.vmap(one)(places, asks, full_from, swa_from)


def bundle_shape(
    model: ServingModel, config: ServingConfig, size: BundleSize, world: World
) -> Parcel:
    """Shapes and dtypes of a bundle; pools and pages of the other side make no difference."""

    def pack(world: World) -> Parcel:
        none = jnp.zeros(size.pieces, jnp.int32)
        ask = Ask(none, none, none, Ticket(none, none))
        return _pack(model, config, size, world, none, ask, none, none)

    return jax.eval_shape(pack, world)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def reserve_all(
    config: ServingConfig,
    world: World,
    arrivals: Arrivals,
    tokens: jax.Array,
    lengths: jax.Array,
    namespaces: jax.Array,
) -> tuple[World, Arrivals, Reserved]:
    """`reserve` for int32[B, L] prompts, in their order; lengths of -1 are none."""

    def one(
        carry: tuple[World, Arrivals], wanted: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[World, Arrivals], Reserved]:
        tokens, length, namespace = wanted
        world, arrivals, reserved = reserve(config, *carry, tokens, length, namespace=namespace)
        return (world, arrivals), reserved

    carry, reserved = jax.lax.scan(one, (world, arrivals), (tokens, lengths, namespaces))
    return *carry, reserved


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def deliver_all(
    model: ServingModel,
    config: ServingConfig,
    world: World,
    arrivals: Arrivals,
    bundle: Parcel,
) -> tuple[World, Arrivals, jax.Array]:
    """`deliver` for a bundle, piece after piece; bool[B] which were accepted."""

    def one(
        carry: tuple[World, Arrivals], parcel: Parcel
    ) -> tuple[tuple[World, Arrivals], jax.Array]:
        def take(
            both: tuple[World, Arrivals, jax.Array],
        ) -> tuple[World, Arrivals, jax.Array]:
            return deliver(model, config, both[0], both[1], parcel)

        is_piece = parcel.piece.ticket.serial != NO_RESERVATION
        world, arrivals, accepted = only_if(is_piece, take, (*carry, jnp.zeros((), bool)))
        return (world, arrivals), accepted

    carry, accepted = jax.lax.scan(one, (world, arrivals), bundle)
    return *carry, accepted


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def seat_all(
    config: ServingConfig, world: World, arrivals: Arrivals, tickets: Ticket, requests: Requests
) -> tuple[World, Arrivals, jax.Array]:
    """`seat` for [B] tickets and requests, in their order; int32[B] places."""

    def one(
        carry: tuple[World, Arrivals], wanted: tuple[Ticket, Requests]
    ) -> tuple[tuple[World, Arrivals], jax.Array]:
        ticket, request = wanted
        request = jax.tree.map(lambda values: values[None], request)
        world, arrivals, place = seat(config, *carry, ticket, request)
        return (world, arrivals), place

    carry, places = jax.lax.scan(one, (world, arrivals), (tickets, requests))
    return *carry, places


@functools.partial(jax.jit, donate_argnums=(0, 1))
def give_up_all(world: World, arrivals: Arrivals, tickets: Ticket) -> tuple[World, Arrivals]:
    """`give_up` for [B] tickets."""

    def one(carry: tuple[World, Arrivals], ticket: Ticket) -> tuple[tuple[World, Arrivals], None]:
        named = ticket.serial != NO_RESERVATION
        return only_if(named, lambda both: give_up(*both, ticket), carry), None

    return jax.lax.scan(one, (world, arrivals), tickets)[0]


__all__ = (
    "NOT_YET",
    "NO_ASK",
    "BundleSize",
    "HostAsk",
    "HostPiece",
    "bundle_shape",
    "deliver_all",
    "give_up_all",
    "host_pieces",
    "pack_bundle",
    "reserve_all",
    "seat_all",
    "tickets_of",
)
