"""A reservation beside plain Python: tickets, ages, own pages, what a piece may be."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax.disagg.commit import has_arrived
from swa_jax.disagg.inbox import (
    Ticket,
    check_sides,
    clear_places,
    count_refused,
    new_inbox,
    new_pages,
    own_pages,
    reserved_pages,
    standing,
    tick,
)
from swa_jax.disagg.receive import _Part

MOST = 2**31 - 1
PLACES, PAGE, TOKENS = 4, 4, 20
POOLS = {
    "two pools": swa.PoolConfig(64, 40, PAGE, 7),
    "pure SWA": swa.PoolConfig.pure_swa(40, PAGE, 7),
}


def inbox_with(pool=POOLS["two pools"], **values):
    """An inbox whose arrays hold what is given."""
    arrays = {name: jnp.asarray(value, jnp.int32) for name, value in values.items()}
    return dataclasses.replace(new_inbox(pool, PLACES, TOKENS), **arrays)


def test_a_ticket_stands_where_its_serial_does():
    serials = [5, 0, 7, 5]
    inbox = inbox_with(serial=serials)
    names = jax.jit(lambda place, serial: standing(inbox, Ticket(place, serial)))
    for place, serial in itertools.product(range(-2, PLACES + 2), (0, 5, 7)):
        right = 0 <= place < PLACES and serial == serials[place] != 0
        stands, at = names(jnp.int32(place), jnp.int32(serial))
        assert (bool(stands), int(at)) == (right, place if right else 0)


def test_ages_and_refusals_stop_at_their_most():
    inbox = inbox_with(serial=[1, 0, 3, 4], age=[0, 0, MOST - 1, MOST], refused=MOST - 1)
    older = tick(inbox)
    assert older.age.tolist() == [1, 0, MOST, MOST]
    counts = [count_refused(inbox, jnp.asarray(one)).refused for one in (False, True)]
    assert [int(count) for count in counts] == [MOST - 1, MOST]
    full = dataclasses.replace(inbox, refused=jnp.int32(MOST))
    assert int(count_refused(full, jnp.asarray(True)).refused) == MOST


def test_a_place_that_is_cleared_is_empty_and_nowhere_is_nobodys():
    inbox = inbox_with(serial=[1, 2, 3, 4], length=[4, 5, 6, 7], refused=3, next_serial=9)
    after = clear_places(inbox, jnp.asarray([1, PLACES]))
    assert after.serial.tolist() == [1, 0, 3, 4]
    assert after.length.tolist() == [4, 0, 6, 7]
    assert (int(after.refused), int(after.next_serial)) == (3, 9)


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_own_pages_are_those_past_the_prefix_and_the_windows_start(pool):
    rng = np.random.default_rng(2)
    count = jax.jit(lambda inbox: (own_pages(inbox), reserved_pages(inbox)))
    for _ in range(30):
        length = rng.integers(0, TOKENS + 1, PLACES)
        prefix = np.minimum(rng.integers(0, 5, PLACES) * PAGE, length // PAGE * PAGE)
        start = np.minimum(prefix + rng.integers(0, 3, PLACES) * PAGE, length // PAGE * PAGE)
        inbox = inbox_with(pool, length=length, prefix_len=prefix, swa_start=start)
        (full, of_swa), reserved = count(inbox)
        firsts = range(0, TOKENS, PAGE)
        swa_right = [[start[row] <= at < length[row] for at in firsts] for row in range(PLACES)]
        full_right = [[prefix[row] <= at < length[row] for at in firsts] for row in range(PLACES)]
        full_right = swa_right if pool.pure_swa_pool else full_right
        assert of_swa.tolist() == swa_right
        assert full.tolist() == full_right
        assert [int(each) for each in reserved] == [np.sum(full_right), np.sum(swa_right)]
        needs = new_pages(pool, *map(jnp.int32, (prefix[0], start[0], length[0])))
        assert [int(each) for each in needs] == [np.sum(full_right[0]), np.sum(swa_right[0])]


def test_all_is_here_when_both_sides_are():
    inbox = inbox_with(
        serial=[1, 2, 3, 0], length=[8, 8, 8, 8], got_full=[8, 9, 7, 8], got_swa=[8, 7, 9, 8]
    )
    assert has_arrived(inbox).tolist() == [True, False, False, False]


def test_a_piece_continues_what_is_here_and_holds_what_was_asked_for():
    room, start = 4, 4
    rows = (jnp.zeros((room, 1)),)
    numbers = [-MOST, -1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 12, MOST]

    @jax.jit
    def ask(begin, count, got, length):
        part = _Part(begin, count, jnp.int32(start), got, rows)
        slots = jnp.asarray([8, 8, 0, 8])
        return (
            part.fits(length),
            part.arrived,
            part.new_tokens(length),
            part.all_placed(slots, length),
        )

    asked = list(itertools.product(numbers, numbers, (4, 6, 9), (6, 9, 13)))
    ask_all = jax.jit(jax.vmap(ask))
    columns = [jnp.asarray(column, jnp.int32) for column in zip(*asked, strict=True)]
    answers = [np.asarray(answer).tolist() for answer in ask_all(*columns)]
    for (begin, count, got, length), *answer in zip(asked, *answers, strict=True):
        fits, arrived, tokens, placed = answer
        inside = start <= begin <= got and begin + count <= length
        assert fits == (count == 0 or (0 < count <= room and inside)), (begin, count, got, length)
        if not fits:
            continue
        assert arrived == (max(got, begin + count) if count else got)
        first = min(max(begin, 0), length)
        new = [place < count and first + place >= got for place in range(room)]
        assert tokens == [first + n if one else MOST for n, one in enumerate(new)]
        assert placed == (not new[2])


def test_a_side_without_layers_has_room_for_any_number_of_tokens():
    part = _Part(*map(jnp.int32, (0, 1000, 0, 0)), rows=())
    assert part.fits(jnp.int32(1000))
    assert not part.fits(jnp.int32(999))


def test_sides_that_do_not_belong_together_are_named():
    inbox, state = inbox_with(), swa.init(POOLS["two pools"])
    check_sides(inbox, state, None)
    wrong: list[tuple[Any, Any]] = [(state, state), (inbox, inbox), (state, inbox)]
    for one, other in wrong:
        with pytest.raises(ValueError, match="expected an Inbox and an AllocatorState"):
            check_sides(one, other, None)
    with pytest.raises(ValueError, match="must have one configuration"):
        check_sides(inbox, swa.init(POOLS["pure SWA"]), None)
