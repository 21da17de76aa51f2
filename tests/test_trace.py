"""Trace readers: the two formats, and files that are neither."""

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swa_jax.replay import trace as trace_module
from swa_jax.replay import trace_lines
from swa_jax.replay.trace import Trace, TraceError, load_trace

GOOD = {"timestamp": 5, "input_length": 513, "output_length": 2, "hash_ids": [0, 1]}
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def line(**change):
    return json.dumps({**GOOD, **change})


@pytest.fixture
def load(tmp_path):
    def write_and_load(content, limit=None):
        path = tmp_path / "some.trace"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_trace(path, limit)

    return write_and_load


def test_mooncake(load):
    trace = load(line() + "\n" + line(timestamp=9, output_length=0, input_length=1, hash_ids=[7]))
    assert (trace.name, trace.source_format, trace.block_tokens) == ("some", "mooncake", 512)
    assert len(trace) == 2
    assert trace.arrival_ms.tolist() == [0, 4]
    assert trace.prompt_lens.tolist() == [513, 1]
    assert trace.output_lens.tolist() == [2, 0]
    assert [ids.tolist() for ids in trace.hash_ids] == [[0, 1], [7]]
    dtypes = [a.dtype for a in (trace.arrival_ms, trace.prompt_lens, trace.output_lens)]
    assert dtypes == [np.int64, np.int32, np.int32]
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_lens[0] = 3


def test_azure(load):
    rows = [
        HEADER,
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,0",
        "2023-11-17 00:00:00,1,2",
    ]
    trace = load("\r\n".join(rows) + "\r\n")
    assert (trace.source_format, trace.hash_ids, trace.block_tokens) == ("azure", None, None)
    assert trace.arrival_ms.tolist() == [0, 52, 20_576_020]
    assert trace.prompt_lens.tolist() == [4808, 3180, 1]
    assert trace.output_lens.tolist() == [10, 0, 2]


def test_azure_times_with_a_zone(load):
    rows = ["2024-05-10 00:00:00.5+00:00,1,1", "2024-05-10T02:00:01+02:00,2,1"]
    assert load("\n".join([HEADER, *rows])).arrival_ms.tolist() == [0, 500]


@pytest.mark.parametrize("wrap", [lambda b: b"\xef\xbb\xbf" + b, lambda b: b"\r\n \n" + b])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n\r\n  \n\n"])
@pytest.mark.parametrize("text", [line(), HEADER + "\r\n2023-11-16 18:17:03,513,2"])
def test_marks_line_ends_and_blank_lines_do_not_matter(load, text, wrap, end):
    trace = load(wrap(text.encode()) + end)
    assert trace.prompt_lens.tolist() == [513]


def test_the_format_is_found_by_content(tmp_path):
    path = tmp_path / "misnamed.csv"
    path.write_text(line())
    assert load_trace(str(path)).source_format == "mooncake"


def test_requests_are_put_in_order_of_arrival(load):
    text = "\n".join(line(timestamp=t, output_length=n) for n, t in enumerate([7, 3, 7, 3]))
    trace = load(text)
    assert trace.arrival_ms.tolist() == [0, 0, 4, 4]
    assert trace.output_lens.tolist() == [1, 3, 0, 2]


def test_limit_takes_the_start_and_looks_no_further(load):
    text = "\n".join([line(), line(), "rubbish"])
    assert len(load(text, 1)) == 1
    assert len(load(text, 2)) == 2
    assert len(load(line(), 100)) == 1
    with pytest.raises(TraceError, match="line 3: not JSON"):
        load(text, 3)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "3", 10**9])
def test_limit_must_be_a_count(load, bad):
    with pytest.raises(ValueError, match="limit must be None or an integer from 1 to"):
        load(line(), bad)


def test_bundled_trace():
    trace = load_trace("mooncake-conversation")
    assert (trace.name, trace.source_format, len(trace)) == (
        "mooncake-conversation",
        "mooncake",
        1000,
    )
    assert trace.arrival_ms[-1] == 330_000
    assert int(trace.prompt_lens.sum()) == 13_732_944
    assert trace.hash_ids is not None
    assert [len(ids) for ids in trace.hash_ids] == (-(-trace.prompt_lens // 512)).tolist()
    assert len(load_trace("mooncake-conversation", limit=10)) == 10


# --- lines that are wrong -----------------------------------------------------------------------

LENGTH = "must be an integer from 1 to 2\\^31 - 1 \\(tokens\\), got "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 1', "not JSON: .* at character"),
        (line() + line(), "not JSON: Extra data"),
        ('{"a":' * 100_000, "not JSON that can be read"),
        (line(input_length=int("9" * 4000)), LENGTH + "9999"),
        ("{" + '"timestamp": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ("{}", "missing timestamp, input_length, output_length, hash_ids; .*got the keys \\[\\]"),
        ('{"timestamp": 1, "hash_ids": []}', "missing input_length, output_length;"),
        (line(input_length=0), "input_length " + LENGTH + "0$"),
        (line(input_length=-1), "input_length " + LENGTH + "-1$"),
        (line(input_length=2**31), "input_length " + LENGTH + "2147483648$"),
        (line(input_length=513.0), "input_length " + LENGTH + "513.0$"),
        (line(input_length=float("nan")), "input_length " + LENGTH + "nan$"),
        (line(input_length=True), "input_length " + LENGTH + "True$"),
        (line(input_length="513"), "input_length " + LENGTH + "'513'$"),
        (line(input_length=None), "input_length " + LENGTH + "None$"),
        (line(output_length=-1), "output_length must be an integer from 0 to .*got -1$"),
        (line(output_length=2**31), "output_length must be an integer from 0 to"),
        (line(timestamp=-1), "timestamp must be an integer from 0 to 2\\^53 - 1 \\(ms\\), got -1$"),
        (line(timestamp=2**53), "timestamp must be an integer from 0 to"),
        (line(timestamp=0.5), "timestamp must be .*got 0.5$"),
        (line(timestamp=float("inf")), "timestamp must be .*got inf$"),
        (line(hash_ids=None), "hash_ids must be a list of integers, got None"),
        (line(hash_ids=[1]), "one id for each 512 tokens of the prompt: 2 .*got 1$"),
        (line(hash_ids=[1, -1]), "integers from 0 to 2\\^63 - 1, got -1$"),
        (line(hash_ids=[1, True]), "integers from 0 to 2\\^63 - 1, got True$"),
        (line(hash_ids=[1, 2**63]), "integers from 0 to 2\\^63 - 1, got 9223372036854775808$"),
        (line(hash_ids=[1, "é" * 500]), "integers from 0 to 2\\^63 - 1, got 'éé.*\\.\\.\\.$"),
        ("[1, 2]", "must hold one JSON object, got \\[1, 2\\]"),
        (HEADER, "not JSON"),
    ],
)
def test_bad_mooncake_line(load, text, message):
    with pytest.raises(TraceError, match=message) as error:
        load("\n\n" + line() + "\n" + text + "\n" + line())
    assert error.value.line == 4
    assert "some.trace, line 4: " in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,2", "need 3 columns, TIMESTAMP,ContextTokens,GeneratedTokens; got 2 in '1,2'"),
        ("a,b,c,d,e", "need 3 columns, .*; got 5 in"),
        ("yesterday,1,2", "TIMESTAMP must be .* such as 2023-11-16 .*, got 'yesterday'"),
        ("2023-13-16 18:17:03,1,2", "TIMESTAMP must be"),
        ("2023-11-16 18:17:60,1,2", "TIMESTAMP must be"),
        ("2023-11-16,1,2", "TIMESTAMP must be"),
        ("2023-11-16 18:17:03+99:00,1,2", "TIMESTAMP must be"),
        ("2023-11-16 18:17:03.,1,2", "TIMESTAMP must be"),
        ("٢023-11-16 18:17:03,1,2", "TIMESTAMP must be"),
        (",1,2", "TIMESTAMP must be .* got ''"),
        ("2023-11-16 18:17:03,0,2", "ContextTokens " + LENGTH + "0$"),
        ("2023-11-16 18:17:03,-4,2", "ContextTokens " + LENGTH + "-4$"),
        ("2023-11-16 18:17:03,2147483648,2", "ContextTokens " + LENGTH + "2147483648$"),
        ("2023-11-16 18:17:03," + "9" * 9999 + ",2", "ContextTokens " + LENGTH + "'999"),
        ("2023-11-16 18:17:03,1.0,2", "ContextTokens " + LENGTH + "'1.0'$"),
        ("2023-11-16 18:17:03,nan,2", "ContextTokens " + LENGTH + "'nan'$"),
        ("2023-11-16 18:17:03,,2", "ContextTokens " + LENGTH + "''$"),
        ("2023-11-16 18:17:03,1,-1", "GeneratedTokens must be .* got -1$"),
        ("2023-11-16 18:17:03,1,true", "GeneratedTokens must be .* got 'true'$"),
        (line(), "need 3 columns"),
    ],
)
def test_bad_azure_row(load, row, message):
    with pytest.raises(TraceError, match=message) as error:
        load(f"{HEADER}\n2023-11-16 18:17:03,1,2\n{row}\n")
    assert error.value.line == 3
    assert len(str(error.value)) < 500


# --- files that are wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "some.trace: the file is empty; a trace has at least one request"),
        (b"\n \r\n", "the file is empty"),
        (b"\xef\xbb\xbf", "the file is empty"),
        (HEADER.encode(), "a header but no request"),
        (b"hello", "line 1: neither of the known formats: .*Mooncake.*Azure.*got 'hello'"),
        (b"[" + line().encode() + b"]", "neither of the known formats"),
        (HEADER.encode() + b",X\n", "neither of the known formats"),
        (line().encode("utf-16"), "not a text file: byte 4 of the line is zero"),
        (b"\x7fELF\0\0", "not a text file: byte 5"),
        (b"\xff\xfe\n", "line 1: not UTF-8: byte 1 of the line is 0xff; save the file as UTF-8"),
        (line().encode() + b"\n{\x80}", "line 2: not UTF-8: byte 2 of the line is 0x80"),
        (b"\x1f\x8b\x08\0", "this is a gzip file; unpack it first"),
        (b"PK\x03\x04", "this is a zip file"),
    ],
)
def test_a_file_that_is_no_trace(load, content, message):
    with pytest.raises(TraceError, match=message):
        load(content)


def test_a_line_too_long_is_not_read_whole(load):
    content = b"{" + b" " * trace_lines.MAX_LINE_BYTES
    with pytest.raises(TraceError, match="line 1: the line is longer than the 4 MiB allowed"):
        load(content + b"\n" + line().encode())
    asked = []

    class Endless:
        def readline(self, size):
            asked.append(size)
            return b"x" * size

    with pytest.raises(TraceError, match="longer than"):
        list(trace_lines.numbered_lines(Endless(), "endless"))  # type: ignore[arg-type]
    assert asked == [trace_lines.MAX_LINE_BYTES + 1]


def test_memory_is_bounded(load, monkeypatch):
    monkeypatch.setattr(trace_module, "MAX_REQUESTS", 3)
    text = "\n".join([line()] * 4)
    with pytest.raises(TraceError, match="line 4: more than the 3 requests allowed; give a limit"):
        load(text)
    assert len(load(text, 3)) == 3
    monkeypatch.setattr(trace_module, "MAX_HASH_IDS", 3)
    with pytest.raises(TraceError, match="line 2: more than the 3 hash ids allowed"):
        load(text, 3)


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(TraceError, match="this is a directory"):
        load_trace(tmp_path)
    with pytest.raises(TraceError, match="no such file \\(bundled: mooncake-conv"):
        load_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="no such file; did you mean 'mooncake-conversation'"):
        load_trace("mooncake-conversations")
    with pytest.raises(TraceError, match="not a path"):
        load_trace("a\0b")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace("x" * 10_000)
    for odd in (3, None, b"bytes"):
        with pytest.raises(TraceError, match="need a path or a name"):
            load_trace(odd)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system here")
def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="not a regular file"):
        load_trace(tmp_path / "pipe")


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text(line())

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # chmod does not stop a superuser
    with pytest.raises(TraceError, match="secret: cannot be read: Permission denied"):
        load_trace(path)


# --- properties ---------------------------------------------------------------------------------

JUNK = st.sampled_from(
    [b"\n", b"\r\n", b",", b"{", b"}", b"[", b'"', b"\0", b"\xff", b"-1", b"1e9", b"NaN", b"true"]
    + [line().encode() + b"\n", HEADER.encode() + b"\n", b"2023-11-16 18:17:03.5,3,2\n"]
    + [f'"{key}": '.encode() for key in GOOD]
) | st.binary(max_size=4)


@given(parts=st.lists(JUNK, max_size=8), limit=st.none() | st.integers(1, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_a_trace_or_a_trace_error(load, parts, limit):
    with contextlib.suppress(TraceError):
        check(load(b"".join(parts), limit))


@given(position=st.integers(0, 200), new=st.binary(max_size=3), csv=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_good_file_with_damage_gives_a_trace_or_a_trace_error(load, position, new, csv):
    rows = [HEADER, "2023-11-16 18:17:03.5,3,2"] if csv else [line(), line(timestamp=2)]
    content = "\n".join(rows).encode()
    with contextlib.suppress(TraceError):
        check(load(content[:position] + new + content[position + len(new) :]))


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2**53 - 1), st.integers(1, 3000), st.integers(0, 2**31 - 1)),
        min_size=1,
        max_size=8,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(load, requests):
    ids = [list(range(-(-prompt // 512))) for _, prompt, _ in requests]
    text = "\n".join(
        line(timestamp=t, input_length=p, output_length=o, hash_ids=i)
        for (t, p, o), i in zip(requests, ids, strict=True)
    )
    trace = load(text)
    check(trace)
    ordered = sorted(requests, key=lambda request: request[0])
    assert trace.prompt_lens.tolist() == [prompt for _, prompt, _ in ordered]
    assert trace.output_lens.tolist() == [output for *_, output in ordered]
    assert trace.arrival_ms.tolist() == [time - ordered[0][0] for time, *_ in ordered]


def check(trace: Trace):
    assert len(trace) >= 1
    assert trace.arrival_ms[0] == 0
    assert (np.diff(trace.arrival_ms) >= 0).all()
    assert (trace.prompt_lens >= 1).all()
    assert (trace.output_lens >= 0).all()
    assert (trace.hash_ids is None) == (trace.block_tokens is None)
    assert trace.hash_ids is None or len(trace.hash_ids) == len(trace)
