"""Prefill on one worker, decode on another, in one process: texts, pages, and what goes wrong.

The model's KV is the text, so that a wrong page shows. Pages, pools and devices of the two differ.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from ledger_model import Ledger
from serving_checks import assert_only_the_cache_holds, figures

import swa_jax as swa
from swa_jax import disagg
from swa_jax.counts import held_pages
from swa_jax.disagg.agree import check_agree, hello_of
from swa_jax.disagg.bundles import BundleSize, HostAsk
from swa_jax.disagg.decode_peer import ARRIVED, ASKED, READY, RUNNING
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.jobs import LOST, Job
from swa_jax.disagg.one_process import join_here, run_jobs
from swa_jax.disagg.prefill_worker import PrefillWorker
from swa_jax.serving import (
    ServingConfig,
    make_requests,
    serve,
)

WINDOW, PLACES, LONGEST, NEW = 6, 8, 30, 8
MODEL = Ledger(WINDOW)
DECODE_POOL = swa.PoolConfig(80, 32, 4, WINDOW - 1)
PREFILL_POOL = swa.PoolConfig(
    72, 40, 2, disagg.prefill_window(swa.PoolConfig(72, 40, 2, WINDOW - 1), DECODE_POOL, 0)
)
DECODE = ServingConfig(
    DECODE_POOL, LONGEST + NEW, max_running=3, chunk_tokens=8, prefill_rows=2, max_new_tokens=NEW
)
PREFILL = dataclasses.replace(DECODE, pool=PREFILL_POOL, role="prefill")
SIZE = BundleSize(pieces=4, full_tokens=8, swa_tokens=8)


def workers():
    """Both, on devices of their own."""
    here, there = jax.devices()[:2]
    prefill = PrefillWorker(MODEL, PREFILL, None, places=PLACES, size=SIZE)
    prefill.world = jax.device_put(prefill.world, here)
    decode = DecodeWorker(MODEL, DECODE, None, places=PLACES, reservations=4, size=SIZE)
    decode.world, decode.arrivals = jax.device_put((decode.world, decode.arrivals), there)
    return prefill, decode


def joined(**options):
    prefill, decode = workers()
    return join_here(prefill, decode, jax.devices()[1], **options)


@functools.cache
def jobs(count=24):
    """Every second prompt begins like the one before it."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 97, int(n)).tolist() for n in rng.integers(1, LONGEST, count)]
    for index in range(1, count, 2):
        prompts[index] = (prompts[index - 1] + prompts[index])[:LONGEST]
    return [Job(name, tuple(prompt), NEW) for name, prompt in enumerate(prompts)]


def text(job, count=NEW):
    return tuple(MODEL.continuation(job.prompt, count))


def assert_clean(prefill, decode):
    for worker in (prefill, decode):
        assert_only_the_cache_holds(worker.world.allocator, worker.world.cache)
        assert figures(worker.world)["refused"] == 0
    inbox, world = decode.arrivals.inbox, decode.world
    assert disagg.reserved_pages(inbox) == (0, 0)
    disagg.check(inbox, world.allocator, world.cache, others=(0, 0))


def test_every_request_gets_its_own_text_and_only_what_is_lacking_is_sent():
    prefill, decode = joined()
    decode.submit(jobs())
    outcomes = run_jobs(prefill, decode)
    assert {job.name: text(job) for job in jobs()} == {
        name: outcome.tokens for name, outcome in outcomes.items()
    }
    assert {outcome.reason for outcome in outcomes.values()} == {"length"}
    assert_clean(prefill.worker, decode.worker)
    assert figures(prefill.worker.world)["decode_steps"] == 0
    seen = decode.traffic
    assert seen.requests == len(outcomes)
    assert 0 < seen.swa_tokens < seen.full_tokens < seen.tokens
    assert int(decode.worker.arrivals.inbox.refused) == 0
    assert any(outcome.cached for outcome in outcomes.values())


def test_aborts_anywhere_on_the_way_leave_nothing_behind_and_harm_nobody():
    points = {4 * index + 1: point for index, point in enumerate(
        (READY, ASKED, "piece", ARRIVED, RUNNING)
    )}  # fmt: skip
    seen, pieces = set(), []

    def on_stage(name, stage):
        if stage == ASKED:
            stage = "piece" if name in pieces else ASKED
            pieces.append(name)
        hit = points.get(name) == stage or (name == 3 and stage == READY)
        if hit:
            seen.add(stage)
        return hit

    prefill, decode = joined(on_stage=on_stage)
    decode.submit(jobs())
    decode.cancel([0])  # the prefill side has not heard of it yet
    outcomes = run_jobs(prefill, decode)
    gone = {name for name, outcome in outcomes.items() if outcome.reason == "cancelled"}
    assert {0, 3} < gone <= {0, 3, *points}
    assert {READY, ASKED, ARRIVED, RUNNING} <= seen
    for job in jobs():
        tokens = outcomes[job.name].tokens
        assert tokens == text(job)[: len(tokens)]
        assert len(tokens) == NEW or job.name in gone
    assert_clean(prefill.worker, decode.worker)


def test_a_prefill_side_that_goes_away_takes_only_what_has_not_arrived():
    prefill, decode = joined()
    decode.submit(jobs())
    outcomes = {}
    while len(outcomes) < 6:
        prefill.turn()
        outcomes |= {outcome.name: outcome for outcome in decode.turn()}
    prefill._channel.close()
    while decode.open_jobs:
        outcomes |= {outcome.name: outcome for outcome in decode.turn()}
    assert not decode.open
    reasons = [outcome.reason for outcome in outcomes.values()]
    assert len(reasons) == len(jobs())
    assert 6 <= reasons.count("length") < len(jobs()) == len(reasons)
    assert set(reasons) == {"length", LOST}
    for job in jobs():
        outcome = outcomes[job.name]
        assert outcome.tokens == (text(job) if outcome.reason == "length" else ())
    prefill.run()  # finds the other side gone, too
    assert_clean(prefill.worker, decode.worker)
    # What was lost can be computed here.
    lost = [job for job in jobs() if outcomes[job.name].reason == LOST][:4]
    decode.worker.submit(lost)
    while decode.worker.running:
        for outcome in decode.worker.turn():
            assert outcome.tokens == text(jobs()[outcome.name])
    assert_clean(prefill.worker, decode.worker)


class Never:
    """A bundle that does not come."""

    def is_ready(self):
        return False


def test_what_does_not_arrive_in_time_is_given_up(monkeypatch):
    prefill, decode = joined(timeout=0.0)
    monkeypatch.setattr(decode._receiver, "fetch", lambda offered, shape: Never())
    decode.submit(jobs()[:8])
    outcomes = run_jobs(prefill, decode)
    for job in jobs()[:8]:
        nothing_to_send = len(job.prompt) == 1
        assert (outcomes[job.name].reason == LOST) != nothing_to_send
    assert_clean(prefill.worker, decode.worker)


# ---- names, lives and links -----------------------------------------------------------------


def small(name, **values):
    return dataclasses.replace(jobs()[8], name=name, **values)


def finish(prefill, decode, limit=40):
    """As `run_jobs`, but not for ever."""
    outcomes = {}
    for _ in range(limit):
        prefill.turn()
        outcomes |= {outcome.name: outcome for outcome in decode.turn()}
    assert decode.open_jobs == prefill.worker.open_jobs == 0
    assert_clean(prefill.worker, decode.worker)
    return {name: (outcome.reason, outcome.tokens) for name, outcome in outcomes.items()}


class Held:
    """A bundle that comes when it may."""

    may = False

    def __init__(self, arriving):
        self.take = arriving.take

    def is_ready(self):
        return Held.may


def test_a_name_can_be_used_again_as_soon_as_it_has_an_outcome(monkeypatch):
    prefill, decode = joined(on_stage=lambda name, stage: stage == cancel_at.pop(name, ""))
    first, second = small(5), Job(5, LONG[:9], NEW)
    for stage in ("prefill", READY, ASKED, ARRIVED, RUNNING, "done"):
        cancel_at = {5: stage}
        decode.submit([first])
        if stage == "prefill":
            decode.cancel([5])
        done = []
        for _ in range(20):
            done = done or decode.turn()
            if not done:
                prefill.turn()
                if stage != "done" and 5 not in cancel_at and decode.open_jobs:
                    cancel_at = {5: stage}
        assert [outcome.name for outcome in done] == [5]
        decode.submit([second])
        assert finish(prefill, decode) == {5: ("length", text(second))}
    # Also while KV for its first life is still on its way.
    fetch = decode._receiver.fetch
    monkeypatch.setattr(decode._receiver, "fetch", lambda *of: Held(fetch(*of)))
    job = Job(6, tuple(reversed(LONG)), NEW)
    for turn in range(2):
        decode.submit([job])
        for _ in range(3):
            prefill.turn()
            decode.turn()
        assert len(decode._ways) > turn
        if turn == 0:
            decode.cancel([6])
    monkeypatch.setattr(Held, "may", True)
    assert finish(prefill, decode) == {6: ("length", text(job))}


class Deaf:
    """A channel whose other end is gone once it is told something of a kind."""

    def __init__(self, channel, kind):
        self.kind = kind
        self.recv, self.poll, self.close = channel.recv, channel.poll, channel.close
        self._channel = channel

    def send(self, message):
        if message[0] == self.kind:
            raise BrokenPipeError
        self._channel.send(message)


@pytest.mark.parametrize("kind", ["submit", "ask", "arrived", "cancel"])
def test_a_link_that_dies_while_something_is_said_leaves_outcomes_and_no_reservation(kind):
    prefill, decode = joined()
    decode._channel = Deaf(decode._channel, kind)
    never = Job(1, tuple(range(DECODE.max_context)), 1)
    wanted = [small(2), small(3)]
    decode.submit([*wanted, never] if kind == "cancel" else wanted)
    reserve, refuse = decode.worker.reserve, kind == "cancel"

    def refuses(jobs):
        asks, hopeless = reserve(jobs)
        if refuse:  # the last of them does not fit, whatever the pools hold
            decode.worker.give_up([asks[-1]] if asks[-1] else [])
            asks[-1], hopeless[-1] = None, True
        return asks, hopeless

    decode.worker.reserve = refuses
    outcomes = finish(prefill, decode, 20)
    assert not decode.open
    assert set(outcomes) >= {2, 3}
    there = {outcome for name, outcome in outcomes.items() if name in (2, 3)}
    assert there <= {("length", text(wanted[0])), (LOST, ()), ("rejected", ())}
    assert kind != "arrived" or ("length", text(wanted[0])) in there


def test_a_submit_that_is_refused_takes_none():
    prefill, decode = joined()
    with pytest.raises(ValueError, match="twice"):
        decode.submit([small(1), small(1)])
    decode.submit([small(1)])
    with pytest.raises(ValueError, match="open already"):
        decode.submit([small(2), small(1)])
    with pytest.raises(ValueError, match="expected a Job"):
        decode.submit([small(2), 3])  # type: ignore[list-item]
    assert decode.open_jobs == 1
    # Jobs of the worker's own may be beside, also of the same name.
    decode.worker.submit([small(1), small(9)])
    with pytest.raises(ValueError, match="open already"):
        decode.worker.submit([small(9)])
    with pytest.raises(ValueError, match="at most 4"):
        decode.worker.submit([small(name) for name in range(20, 25)])
    right = ("length", text(small(1)))
    assert finish(prefill, decode) == {1: right, 9: right}


def test_reservations_that_keep_who_runs_from_going_on_are_given_up():
    prefill, decode = joined()
    wanted = [Job(name, LONG[:26], NEW, namespace=name) for name in range(4)]
    run, stood = decode.worker.turn, []

    def turn(steps=4):
        done = run(steps)
        if decode._arrived and len(stood) < 2:
            stood.append(max(decode._arrived))
            decode.worker.stands = True
        return done

    decode.worker.turn = turn
    seat = decode.worker.seat

    def one_at_a_time(jobs):
        if decode.worker.running:
            return [False] * len(jobs)
        return [*seat(jobs[:1]), *[False] * (len(jobs) - 1)]

    decode.worker.seat = one_at_a_time
    decode.submit(wanted)
    assert finish(prefill, decode, 80) == {job.name: ("length", text(job)) for job in wanted}
    assert len(set(stood)) == 2  # each began a new life
    assert decode.traffic.requests == len(wanted) + 2


def test_who_wants_no_tokens_is_done_as_with_one_worker():
    prefill, decode = joined()
    longest = tuple(range(DECODE.max_context))
    decode.submit([Job(1, longest, 0), Job(2, (*longest, 0), 0), small(3, max_new_tokens=0)])
    reasons = {name: outcome[0] for name, outcome in finish(prefill, decode, 8).items()}
    assert reasons == {1: "length", 2: "rejected", 3: "length"}


BAD = (
    {"max_new_tokens": 2**40}, {"max_new_tokens": -3}, {"max_new_tokens": 2.7},
    {"namespace": 2**31}, {"seed": 2**33}, {"temperature": -1.0}, {"temperature": float("nan")},
    {"top_p": 7.0}, {"top_k": -5}, {"top_k": (1, 2)}, {"ignore_eos": 1}, {"name": 1.5},
    {"prompt": "abc"}, {"prompt": (1.7, 2.0)}, {"prompt": (1, -2)}, {"prompt": (1, 2**33)},
)  # fmt: skip


@pytest.mark.parametrize("wrong", BAD, ids=str)
def test_a_job_is_checked_when_it_is_made(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Job(**{"name": 1, "prompt": (1, 2), **wrong})


# ---- a prefill worker -----------------------------------------------------------------------


LONG = tuple(range(LONGEST))


def prefilling(*names):
    """A prefill worker that has gone as far as it can, with that many long prompts."""
    worker = workers()[0]
    worker.submit([Job(name, LONG, NEW, namespace=name) for name in names])
    return worker, worker.turn(50)[0]


def test_who_is_ready_stays_and_the_loop_stops_when_nobody_else_can_go_on():
    worker, can = prefilling(0, 1, 2, 3)
    before, held = figures(worker.world), held_pages(worker.world.allocator)
    assert 0 < before["steps"] < 50
    assert 0 < len(can) < 4
    assert worker.turn(50) == ([], [])  # tried once more, since what is ready is in the cache now
    before["steps"] += 1
    assert worker.turn(50) == ([], [])
    assert figures(worker.world) == before
    assert held_pages(worker.world.allocator) == held
    worker.end([*can, 3, 99])  # 3 is not ready
    new, ended = worker.turn(50)
    assert dict(ended) == dict.fromkeys(can, "sent")
    assert set(new) == {0, 1, 2, 3} - set(can)
    assert figures(worker.world)["retracted"] == 0


def test_a_worker_whose_rows_are_all_ready_has_nothing_to_do_until_one_is_fetched():
    """Else the process that drives it would turn round and round for nothing."""
    worker, _ = workers()
    worker.submit(jobs()[:PLACES])
    assert worker.is_busy
    ready = []
    for _ in range(100):
        ready += worker.turn()[0]
        if not worker.is_busy:
            break
    assert 0 < len(ready) < PLACES
    worker.end(ready[:1])
    assert worker.is_busy
    while worker.is_busy:
        ready += worker.turn()[0]
    assert len(ready) < PLACES
    worker.cancel_all()
    assert worker.is_busy
    while worker.is_busy:
        worker.turn()
    assert worker.open_jobs == 0


def test_a_worker_has_something_to_do_after_it_was_told_that_something_has_ended():
    worker, _ = workers()
    worker.submit([Job(1, (3, 1, 4), NEW)])
    while worker.is_busy:
        worker.turn()
    assert worker.is_ready(1)
    worker.end([2])
    assert not worker.is_busy
    worker.end([1])
    assert worker.is_busy
    worker.turn(0)
    assert worker.is_busy
    while worker.is_busy:
        worker.turn()
    assert worker.open_jobs == 0


def test_a_bundle_that_names_others_than_those_it_is_for_is_nonsense():
    """Else a job would count as here of which a piece is missing, and wait for ever."""
    prefill, decode = joined()
    decode.submit(jobs()[:4])
    sent = prefill._channel.send

    def wrongly(message):
        if message[0] == "bundle" and len(set(message[2])) > 1:
            message = (*message[:2], [message[2][-1]] * len(message[2]))
        sent(message)

    prefill._channel.send = wrongly
    outcomes = run_jobs(prefill, decode)
    assert "names others" in str(decode.wrong)
    assert LOST in {outcome.reason for outcome in outcomes.values()}
    assert len(outcomes) == 4
    assert disagg.reserved_pages(decode.worker.arrivals.inbox) == (0, 0)


def test_a_piece_of_a_request_that_is_not_here_is_refused():
    worker, _ = prefilling(0)
    length = LONGEST - 1
    ask = HostAsk(0, 1, 0, 0, length)
    tail = ask._replace(swa_start=length - 4)

    def packed(*wanted):
        return jax.device_get(worker.pack(wanted).piece)

    # Nobody is called 7; this starts before what was asked for; so much is not computed.
    piece = packed((7, tail, 0, length - 4), (0, tail, 0, 0), (0, ask._replace(length=40), 32, 32))
    assert piece.ok.tolist() == [False] * 4
    assert not piece.rows.full[0].any()
    piece = packed((0, tail, 0, length - 4))
    assert piece.ok.tolist() == [True, False, False, False]
    assert piece.rows.full[0][0].tolist() == list(LONG[:8])
    assert piece.rows.swa[0][0, :4].tolist() == list(LONG[length - 4 : length])


# ---- a decode worker ------------------------------------------------------------------------


def decode_worker():
    return workers()[1]


def reserved(worker, *jobs):
    """What is lacking of each; all of them fit."""
    asks, _ = worker.reserve(jobs)
    assert None not in asks
    return [ask for ask in asks if ask is not None]


def refused(worker, job):
    """Whether there is no room for a job now, or never."""
    asks, never = worker.reserve([job])
    assert asks == [None]
    return "never" if never[0] else "now"


def test_reservations_count_as_held_and_who_does_not_fit_beside_them_waits():
    worker = decode_worker()
    long = Job(0, LONG, NEW)
    asks = reserved(worker, *(dataclasses.replace(long, namespace=n) for n in (1, 2)))
    assert refused(worker, dataclasses.replace(long, namespace=3)) == "now"
    assert refused(worker, Job(9, tuple(range(DECODE.max_context + 2)))) == "never"
    worker.submit([long])
    outcomes = [outcome for _ in range(6) for outcome in worker.turn(20)]
    assert not outcomes
    assert figures(worker.world)["retracted"] == 0
    worker.give_up(asks[:1])
    while worker.running:
        outcomes += worker.turn(20)
    assert outcomes[0].tokens == text(long)
    worker.give_up(asks)
    assert int(worker.arrivals.inbox.refused) == 1  # the first is given up already


def test_a_reservation_leaves_rows_what_they_were_promised_and_waits_behind_who_waits():
    worker = decode_worker()
    worker.submit([Job(0, LONG, NEW)])
    worker.turn(1)  # holds two pages of eight
    (ask,) = reserved(worker, Job(1, LONG, namespace=1))
    free = int(swa.full_available_size(worker.world.allocator)) // DECODE_POOL.page_size
    assert free == 20 - 2 - 8 > 8
    assert refused(worker, Job(2, LONG, namespace=2)) == "now"
    worker.give_up([ask])
    worker.submit([Job(name, (name,), NEW) for name in range(3, 6)])  # one waits for a row
    worker.turn(1)
    assert refused(worker, Job(6, (6,))) == "now"
    while worker.running:
        worker.turn()
    (ask,) = reserved(worker, Job(6, (6,)))
    worker.give_up([ask])
    assert_only_the_cache_holds(worker.world.allocator, worker.world.cache)


def same(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, other))


def test_nobody_is_seated_before_all_is_here_or_without_a_row_and_nothing_changes():
    worker = decode_worker()
    job = jobs()[8]
    (ask,) = reserved(worker, job)
    short = Job(0, (5,))

    def seated(ask, job):
        before = jax.device_get((worker.world, worker.arrivals))
        good = worker.seat([(job, ask)])[0]
        assert good or same(before, jax.device_get((worker.world, worker.arrivals)))
        return good

    assert not seated(ask, job)  # nothing has arrived
    (empty,) = reserved(worker, short)
    assert not seated(empty, Job(0, (5, 6)))  # another text
    assert not seated(empty, Job(0, (5,), namespace=1))
    assert not seated(empty._replace(serial=99), short)
    assert seated(empty, Job(0, (5,), max_new_tokens=LONGEST + NEW))  # is rejected, and gone
    assert [outcome.reason for outcome in worker.turn()] == ["rejected"]
    others = [Job(name, (name,), NEW) for name in range(1, 4)]
    asks = reserved(worker, *others)
    assert worker.seat(list(zip(others, asks, strict=True))) == [True] * 3
    (late,) = reserved(worker, short)
    assert not seated(late, short)  # three rows
    outcomes = [outcome for _ in range(9) for outcome in worker.turn()]
    assert {o.name: o.tokens for o in outcomes} == {j.name: text(j) for j in others}
    assert seated(late, short)
    worker.give_up([ask])
    while worker.running:
        worker.turn()
    assert_only_the_cache_holds(worker.world.allocator, worker.world.cache)


# ---- what a mistake would do ----------------------------------------------------------------


def test_a_prefill_side_that_forgets_too_early_is_noticed(monkeypatch):
    prefill, decode = joined()
    hear = prefill._hear

    def forgets(message):
        hear(message)
        if message[0] == "ask":
            prefill.worker.end([name for name, _ in message[1]])

    monkeypatch.setattr(prefill, "_hear", forgets)
    decode.submit(jobs()[8:12])
    outcomes = run_jobs(prefill, decode)
    assert LOST in {outcome.reason for outcome in outcomes.values()}
    assert_clean(prefill.worker, decode.worker)


def test_a_reservation_that_is_not_given_up_would_show(monkeypatch):
    prefill, decode = joined(on_stage=lambda name, stage: stage == ASKED and name == 9)
    monkeypatch.setattr(decode.worker, "give_up", lambda asks: None)
    decode.submit(jobs()[8:12])
    run_jobs(prefill, decode)
    with pytest.raises(AssertionError):
        assert_clean(prefill.worker, decode.worker)


# ---- what is refused ------------------------------------------------------------------------


def test_workers_that_do_not_fit_each_other_are_refused():
    prefill, decode = workers()
    hello = hello_of(prefill)
    check_agree(hello, decode)
    wrong = {
        "sliding_window=": dataclasses.replace(hello, pool=swa.PoolConfig(72, 40, 2, WINDOW - 1)),
        "same keys": dataclasses.replace(hello, key_lag=1),
        "one model": dataclasses.replace(hello, shapes=hello.shapes[1:]),
    }
    for why, other in wrong.items():
        with pytest.raises(ValueError, match=why):
            check_agree(other, decode)


def test_wrong_roles_and_sizes_are_refused():
    with pytest.raises(ValueError, match="role must be one of both, prefill"):
        dataclasses.replace(DECODE, role="decode")
    with pytest.raises(ValueError, match='role="prefill"'):
        PrefillWorker(MODEL, DECODE, None)
    with pytest.raises(ValueError, match='role="both"'):
        DecodeWorker(MODEL, PREFILL, None)
    with pytest.raises(ValueError, match="driven by run_steps"):
        serve(MODEL, None, make_requests([[1]]), PREFILL)
    with pytest.raises(ValueError, match="pieces must be"):
        BundleSize(pieces=0)
    with pytest.raises(ValueError, match="has no tokens"):
        Job(1, ())
    decode = joined()[1]
    decode.submit([Job(1, (2,))])
    with pytest.raises(ValueError, match="open already"):
        decode.submit([Job(1, (3,))])
