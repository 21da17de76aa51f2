"""A reservation beside plain Python: tickets, ages, own pages, what a piece may be."""

import dataclasses
import itertools
import pickle
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax.disagg.bundles import BundleSize, HostAsk
from swa_jax.disagg.commit import _holding, has_arrived
from swa_jax.disagg.decode_peer import DecodePeer
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
from swa_jax.disagg.jobs import LOST, Job, check_new, places_in_parts
from swa_jax.disagg.links import DeviceLink, LinkError, local_channels
from swa_jax.disagg.preallocate import _need
from swa_jax.disagg.prefill_peer import PrefillPeer
from swa_jax.disagg.receive import _Part
from swa_jax.prefix_cache import Match

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


@pytest.mark.parametrize(
    "pool",
    [
        swa.PoolConfig(64, 40, PAGE),
        swa.PoolConfig(40, 64, PAGE),
        swa.PoolConfig(40, 16, PAGE, 7),
        swa.PoolConfig.pure_swa(16, PAGE, 7),
    ],
)
def test_what_the_empty_pools_could_not_hold_never_comes(pool):
    need = jax.jit(lambda *asked: vars(_need(pool, None, Match(*[jnp.int32(0)] * 3), *asked)))
    full_most, swa_most = pool.full_pages, pool.swa_pages
    for length in range(80):
        pages, dead = -(-length // PAGE), 0
        if pool.sliding_window is not None:
            dead = max(length - pool.sliding_window, 0) // PAGE
        full = pages - dead if pool.pure_swa_pool else pages
        never = full > (swa_most if pool.pure_swa_pool else full_most) or pages - dead > swa_most
        got = need(jnp.int32(length), jnp.asarray(True))
        found = [got[name].item() for name in ("full", "swa", "never")]
        assert found == [full, pages - dead, never]
    assert need(jnp.int32(1), jnp.asarray(False))["never"]


def test_without_a_tree_the_last_token_is_where_the_table_says():
    table, lengths = np.arange(PAGE, PAGE * (PLACES * 5 + 1), PAGE).reshape(PLACES, 5), [0, 1, 4, 7]
    inbox = inbox_with(length=lengths, table=table)
    found = [int(_holding(inbox, jnp.int32(place)).last_loc) for place in range(PLACES)]
    ends = [table[row, (n - 1) // PAGE] + (n - 1) % PAGE for row, n in enumerate(lengths)]
    assert found == [-1, *ends[1:]]


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


# ---- what one side hears from the other


class Books:
    """A decode worker that only counts reservations."""

    def __init__(self):
        self.size, self.bundle_shape, self.running, self.stands = BundleSize(), None, 0, False
        self.serial, self.held = 0, set()

    def reserve(self, jobs):
        serials = range(self.serial + 1, self.serial + 1 + len(jobs))
        self.serial += len(jobs)
        self.held.update(serials)
        return [HostAsk(0, serial, 0, 0, 4) for serial in serials], [False] * len(jobs)

    def give_up(self, asks):
        for ask in asks:
            self.held.remove(ask.serial)

    def cancel(self, names):
        assert not names  # nobody runs

    def turn(self, steps):
        return []


MOST_CONTEXT = 64


class Sheets:
    """A prefill worker that only notes what it is told."""

    def __init__(self):
        self.size, self.open, self.told = BundleSize(), {}, []
        self.config = SimpleNamespace(max_context=MOST_CONTEXT)

    def submit(self, jobs):
        check_new(jobs, self.open)
        self.open |= {job.name: job for job in jobs}

    def end(self, names):
        self.told.append(("end", names))

    def cancel(self, names):
        self.told.append(("cancel", names))

    def cancel_all(self):
        self.open.clear()

    def is_ready(self, name):
        return name in self.open

    def pack(self, pieces):
        return [name for name, *_ in pieces]

    def turn(self, steps):
        return [], []


JOB = Job(7, (1, 2, 3, 4, 5), 2)


def decode_side():
    """A peer with one job, its books, the other end of its channel, and the job's life."""
    (here, there), books = local_channels(), Books()
    peer = DecodePeer(cast("Any", books), here, DeviceLink(None))
    peer.submit([JOB])
    return peer, books, there, there.recv()[1][0].name


def prefill_side():
    """A peer with one job, 7, its sheets, and the other end of its channel."""
    (here, there), sheets = local_channels(), Sheets()
    link = SimpleNamespace(send=lambda bundle: bundle)
    peer = PrefillPeer(cast("Any", sheets), here, cast("Any", link))
    there.send(("submit", [JOB]))
    peer.turn()
    return peer, sheets, there


def test_a_life_that_is_named_twice_is_ready_once():
    peer, books, there, life = decode_side()
    there.send(("ready", [life, life]))
    peer.turn()
    assert there.recv() == ("ask", [(life, HostAsk(0, 1, 0, 0, 4))])
    peer.cancel([7, 7])
    assert [outcome.name for outcome in peer.turn()] == [7]
    assert not books.held


def test_a_prefill_side_takes_a_name_of_a_message_once():
    peer, sheets, there = prefill_side()
    ask = HostAsk(0, 1, 0, 0, 4)
    there.send(("ask", [(7, ask), (7, ask)]))
    there.send(("arrived", [7, 8, 7]))
    there.send(("cancel", [9, 9]))
    peer.turn()
    assert sheets.told == [("end", [7, 8]), ("cancel", [9])]
    assert there.recv() == ("bundle", [7], [7])
    assert not there.poll()
    at = [part.tolist() for part in places_in_parts({7: 3, 8: 4}, [7, 8, 7, 9], 3)]
    assert at == [[3, 4, -1]]


HUGE = 10**5000  # Python refuses to write it out


def unchecked_jobs():
    """Jobs as bytes can have them: none of their checks has run."""
    for field, value in {
        "prompt": ((), (-5,), ("a",), None),
        "max_new_tokens": (None, -1),
        "namespace": (2**40,),
        "name": (None, HUGE),
    }.items():
        for each in value:
            job = Job(9, (1, 2))
            object.__setattr__(job, field, each)
            yield "submit", [Job(8, (1,)), job]


def test_what_is_not_ready_is_gone_and_makes_no_pieces():
    peer, _, there = prefill_side()
    there.send(("ask", [(8, (0, 1, 0, 0, MOST_CONTEXT)), (7, (0, 2, 0, 0, 4))]))
    peer.turn()
    assert there.recv() == ("gone", [8])
    assert there.recv() == ("bundle", [7], [7])
    assert not there.poll()


def nonsense(kind, names):
    """Messages that mean nothing, with a name beside a wrong one where there are names."""
    parts = [
        () if kind != "bye" else (1,),
        (None,),
        (7,),
        ("ab",),
        ([*names, None],),
        ([*names, [7]],),
        (names, names, 1),
    ]
    return [7, None, (), "ready", ("no such kind",), ({},), *((kind, *rest) for rest in parts)]


@pytest.mark.parametrize("kind", ["ready", "gone", "ended", "bundle"])
def test_a_prefill_side_that_says_what_means_nothing_is_lost(kind):
    more = [("ended", [(7,)]), ("ended", [(7, 7)]), ("bundle", 3, [7]), ("bundle", [], [7])]
    more += [(HUGE,), (kind, HUGE), (kind, [HUGE]), ("bundle", HUGE, [7])]
    for message in [*nonsense(kind, [7]), *more]:
        peer, books, there, life = decode_side()
        there.send(("ready", [life]))
        peer.turn()
        there.send(message)
        there.send(("gone", [life]))
        assert [(o.name, o.reason) for o in peer.turn()] == [(7, LOST)], message
        assert (peer.open, peer.open_jobs, len(books.held)) == (False, 0, 0), message
        assert peer.wrong, message
        assert peer.turn() == []


@pytest.mark.parametrize("kind", ["submit", "ask", "arrived", "cancel", "bye"])
def test_a_decode_side_that_says_what_means_nothing_is_lost(kind):
    ask, new = (0, 1, 0, 0, 4), Job(8, (1,))
    more = [("ask", [(7, ask[1:])]), ("ask", [(7, ask), (8, (0, 1, 0, 0, 2**40))])]
    more += [("submit", [new, JOB]), ("submit", [new, new]), ("ask", [(7, ask), 8])]
    more += [("ask", [(7, (0, 1, 0, 0, MOST_CONTEXT + 1))]), *unchecked_jobs(), (HUGE,)]
    more += [(kind, HUGE), (kind, [HUGE]), ("ask", [(HUGE, ask)])]
    for message in [*nonsense(kind, [7]), *more]:
        peer, sheets, there = prefill_side()
        there.send(message)
        there.send(("cancel", [7]))
        peer.turn()
        assert (peer.open, sheets.open, sheets.told) == (False, {}, []), message
        assert peer.wrong, message
        with pytest.raises(EOFError):  # it is told, and has got nothing else
            there.recv()


@pytest.mark.parametrize("error", [AttributeError, ImportError, pickle.UnpicklingError])
def test_bytes_that_are_no_message_are_nonsense_too(error, monkeypatch):
    def unreadable():
        there._outgoing.clear()
        raise error("no such class")

    peer, _, there, _ = decode_side()
    there.send(b"")
    monkeypatch.setattr(peer._channel, "recv", unreadable)
    assert [outcome.reason for outcome in peer.turn()] == [LOST]
    assert peer.wrong == "the other side sent what cannot be read: no such class"


def test_a_bundle_is_fetched_once():
    link = DeviceLink(jax.devices()[0])
    number = link.send(cast("Any", jnp.zeros(1)))
    link.fetch(number, cast("Any", None))
    for offered in (number, number + 1, [], None):
        with pytest.raises(LinkError, match="was offered, or it was fetched already"):
            link.fetch(cast("Any", offered), cast("Any", None))
