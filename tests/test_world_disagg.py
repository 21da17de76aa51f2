"""kill -9 of either process of a disaggregated pair, at every stage of a request.

The survivor gives all pages back, says "lost" for what it cannot finish, and serves the next one.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
from multiprocessing.connection import Listener

import jax
import pytest
import world_workers as both
from world_faults import child_environment, line_of, python

from swa_jax.disagg.decode_peer import ARRIVED, ASKED, READY, RUNNING
from swa_jax.disagg.jobs import LOST
from swa_jax.disagg.processes import join_prefill, serve_prefill

AUTH = os.urandom(16).hex()
LONG = pytest.mark.long
STAGES = [READY, ASKED, both.PIECE, ARRIVED, RUNNING]


@contextlib.contextmanager
def started(*arguments):
    """`world_workers.py` in a process that does not outlive this."""
    process = subprocess.Popen(
        python("world_workers.py", *arguments),
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(**{both.KEY: AUTH}),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def _nothing_hangs():
    """Whatever waits is interrupted, also in a call of the package."""

    def late(number, frame):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(400)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def decode_worker():
    return both.decode_worker()


@pytest.fixture(scope="module")
def prefill_worker():
    return both.prefill_worker()


@pytest.fixture(scope="module")
def without_cache():
    """Compiled in half the time."""
    return both.prefill_worker(prefix_cache=False)


def named(jobs):
    return {job.name: both.text(job) for job in jobs}


def served_until_it_is_killed(worker, decode):
    """A decode side that kills itself, and what it leaves behind here."""
    serve_prefill(worker, ("127.0.0.1", int(line_of(decode))), AUTH.encode())
    assert decode.wait(60) == -signal.SIGKILL
    assert worker.open_jobs == 0
    both.check_clean(worker)
    gc.collect()


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("submitted", marks=LONG),
        pytest.param(READY, marks=LONG),
        pytest.param(ASKED, marks=LONG),
        both.PIECE,
        pytest.param(ARRIVED, marks=LONG),
    ],
)
def test_a_decode_side_that_is_killed(stage, without_cache):
    """Nothing of it is kept, and the next one gets what it asks for."""
    with started("ask", stage) as decode:
        served_until_it_is_killed(without_cache, decode)
    before = len(jax.live_arrays())
    with started("ask", "never") as decode:
        port = int(line_of(decode))
        serve_prefill(without_cache, ("127.0.0.1", port), AUTH.encode())
        assert decode.wait(60) == 0
    both.check_clean(without_cache)
    gc.collect()
    assert len(jax.live_arrays()) <= before  # bundles that nobody pulled are not kept


@LONG
@pytest.mark.parametrize("stage", STAGES)
def test_a_prefill_worker_that_is_killed(stage, decode_worker):
    worker, first = decode_worker, both.jobs(100)
    with Listener(("127.0.0.1", 0), authkey=AUTH.encode()) as listener:
        with started("prefill", listener.address[1]) as prefill, listener.accept() as channel:
            kill = both.At(stage, prefill.kill)
            peer = join_prefill(worker, channel, on_stage=kill)
            peer.submit(first)
            outcomes = both.run(peer)
            assert not peer.open
            assert kill.count >= 2
        reasons = {outcome.reason for outcome in outcomes.values()}
        assert {LOST} <= reasons <= {"length", LOST}
        assert "length" in reasons or stage not in (ARRIVED, RUNNING)  # what is here goes on
        done = {o.name: o.tokens for o in outcomes.values() if o.reason != LOST}
        assert done.items() <= named(first).items()
        assert all(o.tokens == () for o in outcomes.values() if o.reason == LOST)
        both.check_clean(worker)
        # The next one computes what was lost.
        with started("prefill", listener.address[1]) as prefill, listener.accept() as channel:
            peer = join_prefill(worker, channel)
            peer.submit([job for job in first if job.name not in done])
            again = both.run(peer)
            peer.close()
            assert line_of(prefill) == "served\n"
    assert done | {o.name: o.tokens for o in again.values()} == named(first)
    both.check_clean(worker)


@LONG
@pytest.mark.parametrize("stage", STAGES)
def test_a_decode_worker_that_is_killed(stage, prefill_worker):
    with started("decode", stage) as decode:
        served_until_it_is_killed(prefill_worker, decode)
    with started("decode", "never") as decode:
        port = int(line_of(decode))
        serve_prefill(prefill_worker, ("127.0.0.1", port), AUTH.encode())
        texts = json.loads(line_of(decode))
        assert decode.wait(60) == 0
    assert [tuple(tokens) for tokens in texts] == list(named(both.jobs(0)).values())
    both.check_clean(prefill_worker)
