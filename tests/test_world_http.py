"""Faults around the server: it is killed, its clients die or never read, memory and disk end."""

import contextlib
import functools
import gc
import http.client
import json
import signal
import socket
import struct
import subprocess
import threading
import time

import http_server
import jax
import pytest
import world_server
from http_server import check_laws, dumped, running_server, wait_for
from serving_checks import assert_only_the_cache_holds
from world_faults import child_environment, full_disk, line_of, no_memory, python, unheard

from swa_jax.commands.output import InputError
from swa_jax.commands.serving import _end_told
from swa_jax.http import answers, bind
from swa_jax.http.run import Run
from swa_jax.http.world_owner import WorldOwner
from swa_jax.out_of_memory import is_out_of_memory
from swa_jax.saved_state import restore_world

PROMPT = "the answer to this is known"
MANY = 36  # tokens of a long answer


@contextlib.contextmanager
def serving(cache_dir=None, bound=http_server.bind):
    """A server in a thread; `bound` makes the socket that it listens on."""
    served = world_server.served(cache_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "bind", bound)
        with running_server(served, world_server.Letters()) as running:
            yield running


@pytest.fixture(scope="module")
def shared():
    with serving() as running:
        yield running


@pytest.fixture
def server(shared):
    """Each test leaves nothing behind in it."""
    yield shared
    shared.wait_until_idle()
    check_laws(shared.engine)


def body(prompt=PROMPT, count=MANY, **more):
    return {"model": http_server.NAME, "prompt": prompt, "max_tokens": count} | {
        "temperature": 0,
        **more,
    }


def whole(running, prompt=PROMPT, count=MANY):
    """The text of an answer, and how many tokens of the prompt were cached."""
    status, _, text = running.ask("POST", "/v1/completions", body(prompt, count))
    assert status == 200, text
    said = json.loads(text)
    cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return said["choices"][0]["text"], cached


def ask_and_leave_unread(port, receive_bytes=None, **more):
    """A socket on which a streamed answer comes."""
    line = socket.socket()
    line.settimeout(60)
    if receive_bytes:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    line.connect(("127.0.0.1", port))
    content = dumped(body(stream=True, **more))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    line.sendall(head.encode() + content)
    return line


def rest_of(line):
    """Bytes up to the end of a connection, whatever that is."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := line.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


# ---- the server is killed


@contextlib.contextmanager
def process(port, cache_dir):
    """A server of its own, and where it listens."""
    child = subprocess.Popen(
        python("world_server.py", port, cache_dir),
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    try:
        yield child, int(line_of(child))
    finally:
        child.kill()
        child.communicate()


def test_a_server_that_is_killed_while_it_answers(tmp_path):
    """The client sees it, and the next server on the port has what was kept before."""
    kept = tmp_path / "kept"
    with serving(kept) as before:
        assert whole(before, count=8) == (world_server.answer_to(PROMPT, 8), 0)
    with process(0, kept) as (child, port):
        line = http.client.HTTPConnection("127.0.0.1", port, 60)
        line.request("POST", "/v1/completions", dumped(body(stream=True)))
        answer = line.getresponse()
        received = b"".join(iter(answer.readline, b"\n"))  # the first event
        child.send_signal(signal.SIGKILL)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
        line.close()
        assert received.startswith(b"data: {")
        assert child.wait(60) == -signal.SIGKILL
    with serving(kept, lambda host, _: bind(host, port)) as again:
        assert again.port == port
        text, cached = whole(again)
        assert text == world_server.answer_to(PROMPT, MANY)
        assert cached >= 24
    world = restore_world(kept, world_server.MODEL, world_server.CONFIG, 12, weights="none")
    assert_only_the_cache_holds(world.allocator, world.cache)


@pytest.mark.long
def test_a_server_that_is_told_to_stop_ends_well(tmp_path):
    """What the test before kills ends with 0 otherwise, and leaves its cache."""
    with process(0, tmp_path / "kept") as (child, port):
        running = http_server.Running(None, None, port)
        assert whole(running, count=8)[0] == world_server.answer_to(PROMPT, 8)
        child.terminate()
        assert child.wait(60) == 0
    with serving(tmp_path / "kept") as after:
        assert whole(after, count=8)[1] >= 24


# ---- clients


def test_a_client_that_dies_while_it_is_answered(server):
    """Its connection is reset, as by a kernel that cleans up after kill -9."""
    cancelled = 'requests_total{reason="cancelled"}'
    before = server.metrics()[cancelled]
    for _ in range(3):
        line = ask_and_leave_unread(server.port, n=3)
        assert line.recv(64)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.close()
    assert whole(server)[0] == world_server.answer_to(PROMPT, MANY)
    server.wait_until_idle()
    assert server.metrics()[cancelled] > before


def nothing_is_kept():
    """No text of a request waits for its client any more."""
    gc.collect()
    # Not `isinstance`: there are objects of other libraries that warn when they are asked.
    return not any(type(one) is Run for one in gc.get_objects())


@pytest.mark.long
def test_a_client_that_never_reads_holds_nobody_up_and_is_given_up(monkeypatch):
    def with_small_buffers(host, port):
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        return listener

    monkeypatch.setattr(http_server, "NAME", "n" * 500)  # it is in every event
    monkeypatch.setattr(answers, "MOST_UNREAD_SECONDS", 1.0)
    with serving(bound=with_small_buffers) as server:
        line = ask_and_leave_unread(server.port, receive_bytes=1024, n=8)
        wait_for(lambda: server.engine.open_jobs)
        assert whole(server)[0] == world_server.answer_to(PROMPT, MANY)
        server.wait_until_idle()  # all is generated, and no page held for it, read or not
        check_laws(server.engine)
        wait_for(nothing_is_kept)
        received = rest_of(line)
        assert received.startswith(b"HTTP/1.1 200")
        assert not received.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in received
        line.close()


# ---- no memory


def test_memory_that_ends_while_it_serves_ends_the_server_and_says_so(monkeypatch):
    run, rounds = WorldOwner.run, []

    def runs_out(owner):
        rounds.append(0)
        if len(rounds) > 3:
            no_memory()
        time.sleep(0.05)
        run(owner)

    found = []

    def ask(running):
        found.append(running.ask("POST", "/v1/completions", body())[::2])

    with serving() as server:
        monkeypatch.setattr(WorldOwner, "run", runs_out)
        asking = threading.Thread(target=ask, args=(server,))
        asking.start()
        with ask_and_leave_unread(server.port) as line:
            events = rest_of(line)
        asking.join(60)
        wait_for(lambda: server.server.should_exit)
        error = server.engine.error
    [(status, text)] = found
    assert status == 500
    assert json.loads(text)["error"]["message"] == "the server has failed; its log says why"
    assert b"the server has failed" in events
    assert b"[DONE]" not in events
    assert error is not None
    assert is_out_of_memory(error)
    pool = world_server.CONFIG.pool
    said = "out of memory beside 80 full and 48 SWA"
    with pytest.raises(InputError, match=said), _end_told(pool, None):
        raise error


# ---- no disk


def test_a_cache_that_cannot_be_kept(tmp_path):
    """Every answer was given, what was kept before is there, and the command says what was not."""
    kept = tmp_path / "kept"
    with serving(kept) as server:
        whole(server, count=8)
    with serving(kept) as server:
        assert whole(server, "another text")[0] == world_server.answer_to("another text", MANY)
        server.wait_until_idle()
        with unheard(), full_disk(100):
            server.server.stop()
            server.engine.stop()
        error = server.engine.error
    assert error is not None
    said = "kept: the state cannot be saved: File too large; what was kept there before is as it"
    with pytest.raises(InputError, match=said), _end_told(world_server.CONFIG.pool, str(kept)):
        raise error
    with serving(kept) as server:
        assert whole(server, count=8)[1] >= 24
        assert whole(server, "another text", 8)[1] == 0


def test_other_errors_are_told_as_they_are():
    told = functools.partial(_end_told, world_server.CONFIG.pool)
    for error in (RuntimeError("a bug"), jax.errors.JaxRuntimeError("INTERNAL: a bug"), OSError(5)):
        with pytest.raises(type(error)), told("somewhere"):
            raise error
