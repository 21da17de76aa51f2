"""What is said while a command works: a bar on a terminal, elsewhere a line now and then."""

import io
import sys
import time

import pytest

from swa_jax.commands import progress as command_progress
from swa_jax.commands.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def to(monkeypatch):
    """Sets the stream that stderr is; within the test, since pytest sets it before."""

    def set_to(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(command_progress, "SECONDS", 0.02)
    return set_to


def wait_for(stream, text):
    end = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.005)


def test_without_a_terminal_lines_are_printed_while_nothing_is_called(to):
    stderr = to(io.StringIO())
    with show_progress(wanted=True) as progress:
        wait_for(stderr, "swa-jax: compiling (0 s)\n")
        progress("replaying", 1200, 3000, "7 running")
        wait_for(stderr, "swa-jax: replaying 1,200 of 3,000, 7 running (0 s)\n")
        progress("loading")
        wait_for(stderr, "swa-jax: loading (0 s)\n")
    said = stderr.getvalue()
    time.sleep(0.1)
    assert stderr.getvalue() == said  # it has ended


def test_a_reader_that_is_gone_ends_the_lines(to):
    stderr = to(io.StringIO())
    with show_progress(wanted=True):
        wait_for(stderr, "compiling")
        stderr.close()
        time.sleep(0.05)


def test_a_bar_on_a_terminal(to):
    stderr = to(Terminal())
    with show_progress(wanted=True) as progress:
        progress("replaying", 2, 4, "7 running")
    assert "2/4" in stderr.getvalue()
    assert "7 running" in stderr.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_nothing_where_it_is_not_wanted(stream, to):
    stderr = to(stream())
    with show_progress(wanted=False) as progress:
        progress("replaying", 2, 4)
        time.sleep(0.05)
    assert stderr.getvalue() == ""


def test_nothing_without_stderr(to):
    to(None)
    with show_progress(wanted=True) as progress:
        progress("replaying", 2, 4)
