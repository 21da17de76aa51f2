"""Programs as files: there and back, and whatever a stranger may have written."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recorded import FILES
from unified_walk import unified_config

import swa_jax as swa
from swa_jax import debug
from swa_jax.debug import limits
from swa_jax.debug.files import as_text, from_text
from swa_jax.debug.program import check_program
from swa_jax.debug.values import Given, compress, expand

HEAD = {
    "format": "swa_jax program",
    "version": 1,
    "config": {"full_tokens": 32, "swa_tokens": 32, "page_size": 4},
}
ALLOC = {"call": 1, "name": "alloc", "num_tokens": 8, "capacity": 8}
NOTHING = "\x00"  # takes the name out


def text(calls=(ALLOC,), **changed):
    plain = {**HEAD, "calls": calls, **changed}
    return json.dumps({name: value for name, value in plain.items() if value != NOTHING})


def second(name, **arguments):
    return [ALLOC, {"call": 2, "name": name, **arguments}]


# ---- there and back --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        swa.PoolConfig(32, 32),
        swa.PoolConfig(32, 16, 4, 8, chunked=True),
        swa.PoolConfig.pure_swa(32, 4, 4),
        swa.PoolConfig.request_ring(32, 2, sliding_window=4),
        unified_config(8, 6, 2, 3),
    ],
)
def test_every_configuration_comes_back(config, tmp_path):
    program = debug.Program(config, (debug.Call("clear"),), "said\nin two lines")
    debug.save(program, tmp_path / "p.json")
    assert debug.load(tmp_path / "p.json") == program


def test_a_call_has_a_line_of_its_own(tmp_path):
    outcome = debug.Outcome((24, 24), True, {"misaligned": 1})
    calls = (
        debug.Call("alloc", {"capacity": 8, "num_tokens": 8}, "request 1", outcome),
        debug.Call("share", {"slots": ["1[0:2]"], "live": [True, False]}),
    )
    program = debug.Program(swa.PoolConfig(32, 32, 4), calls)
    debug.save(program, tmp_path / "p.json")
    first = (
        '{"call": 1, "name": "alloc", "owner": "request 1", "num_tokens": 8, "capacity": 8, '
        '"left": [24, 24], "ok": true, "faults": {"misaligned": 1}}'
    )
    assert (tmp_path / "p.json").read_text().splitlines() == [
        "{",
        ' "format": "swa_jax program",',
        ' "version": 1,',
        ' "config": {"full_tokens": 32, "swa_tokens": 32, "page_size": 4},',
        ' "calls": [',
        f"  {first},",
        '  {"call": 2, "name": "share", "slots": ["1[0:2]"], "live": [true, false]}',
        " ]",
        "}",
    ]
    assert debug.load(tmp_path / "p.json") == program


@given(
    st.lists(
        st.integers(-(2**31), 2**31 - 1)
        | st.integers(-1, 1)
        | st.builds(Given, st.integers(1, 3), st.integers(0, 4), st.booleans()),
        max_size=40,
    )
)
def test_values_come_back(values):
    items = compress(values)
    assert len(items) <= len(values)
    assert expand("slots", items) == values
    assert expand("slots", json.loads(json.dumps(items))) == values


# ---- what a stranger may write ---------------------------------------------------------------


BAD = {
    "not JSON": ("{", "Expecting"),
    "no object": ("[]", "must be an object"),
    "too deep": ("[" * 100_000, "too deep"),
    "no text": (b"\xff\xfe\x00", "UTF-8|Expecting|decode"),
    "not a number": (text(num=float("nan")), "NaN is no number"),
    "another format": (text(format="x"), "format 'swa_jax program'"),
    "a later version": (text(version=2), "version 1, got 'swa_jax program' and 2"),
    "version true": (text(version=True), "version 1"),
    "a name twice": (text().replace('"version"', '"format"'), "given twice"),
    "no calls": (text(calls=NOTHING), "lacks calls"),
    "an unknown part": (text(extra=1), "has 'extra'"),
    "calls by name": (json.dumps({**HEAD, "calls": {}}), "calls must be a list"),
    "about a number": (text(about=7), "about must be printable"),
    "about that steers a terminal": (text(about="\x1b[2J"), "about must be printable"),
    "no config": (text(config=NOTHING), "lacks config"),
    "config a list": (text(config=[]), "config must be an object"),
    "an unknown size": (text(config={"full_tokens": 4, "swa_tokens": 4, "x": 1}), "has 'x'"),
    "a size missing": (text(config={"full_tokens": 4}), "lacks swa_tokens"),
    "half a token": (text(config={"full_tokens": 4.5, "swa_tokens": 4}), "positive integer"),
    "a size of 0": (text(config={"full_tokens": 0, "swa_tokens": 4}), "positive integer"),
    "a size past int32": (text(config={"full_tokens": 2**31, "swa_tokens": 4}), "got 2147483648"),
    "a huge number": (
        text().replace('"page_size": 4', f'"page_size": {"9" * 4000}'),
        "got an integer of 13",
    ),
    "a number of too many digits": (
        text().replace('"page_size": 4', f'"page_size": {"9" * 9999}'),
        "digits",
    ),
    "pools too large": (
        text(config={"full_tokens": 2**30, "swa_tokens": 2**30}),
        "smaller pools",
    ),
    "a flag that is a number": (
        text(config={"full_tokens": 4, "swa_tokens": 4, "chunked": 1}),
        "chunked must be true or false",
    ),
    "a layout of nothing": (
        text(
            config={
                "full_tokens": 4,
                "swa_tokens": 4,
                "unified_layout": {
                    "blocks": 2,
                    "block_units": 1,
                    "full_units": 3,
                    "swa_units": 1,
                    "unit_bytes": 1,
                },
            }
        ),
        "holds no page",
    ),
    "a layout with a 0": (
        text(
            config={
                "full_tokens": 4,
                "swa_tokens": 4,
                "unified_layout": {
                    "blocks": 0,
                    "block_units": 1,
                    "full_units": 3,
                    "swa_units": 1,
                    "unit_bytes": 1,
                },
            }
        ),
        "blocks must be an integer from 1",
    ),
    "a call that is a number": (text([3]), "call 1 must be an object"),
    "calls out of order": (text([ALLOC, ALLOC]), 'call 2 must say "call": 2, got 1'),
    "an unknown call": (text(second("steal")), "call 2: no such call: 'steal'"),
    "a call that is a list": (text([{"call": 1, "name": []}]), "no such call"),
    "a private function": (text(second("__init__")), "no such call"),
    "no arguments": (text(second("free")), r"call 2 \(free\): slots must be given"),
    "too many arguments": (
        text(second("free", slots=[4], more=1)),
        "it takes slots, by; got 'more'",
    ),
    "slots that are a number": (text(second("free", slots=4)), "must be a list, got 4"),
    "slots that are a text": (text(second("free", slots="1[0]")), "must be a list"),
    "a slot that is true": (text(second("free", slots=[True])), "int32 numbers"),
    "half a slot": (text(second("free", slots=[4.0])), "int32 numbers"),
    "a slot past int32": (text(second("free", slots=[2**31])), "int32 numbers"),
    "an unknown text": (text(second("free", slots=["all"])), "int32 numbers or texts"),
    "other digits": (text(second("free", slots=["\u0661[0]"])), "int32 numbers or texts"),
    "a repeat past int32": (text(second("free", slots=["2147483648*2"])), "int32 numbers"),
    "a repeat of thousands of millions": (
        text(second("free", slots=["0*999999999"])),
        "more values than",
    ),
    "a range of thousands of millions": (
        text(second("free", slots=["1[0:999999999]"])),
        "more values than",
    ),
    "many values in many calls": (
        text(
            [ALLOC] + [{"call": n, "name": "free", "slots": ["0*4000000"]} for n in range(2, 9)],
        ),
        "more values than",
    ),
    "an empty range": (text(second("free", slots=["1[3:3]"])), "int32 numbers or texts"),
    "of call 0": (text(second("free", slots=["0[3]"])), "int32 numbers or texts"),
    "of a later call": (text(second("free", slots=["2[0]"])), "no call before this one"),
    "of a call that gives nothing": (
        text([*second("free", slots=[4]), {"call": 3, "name": "free", "slots": ["2[0]"]}]),
        "no call before this one",
    ),
    "past an answer": (text(second("free", slots=["1[8]"])), "call 1 has 8 places"),
    "an SWA slot as a full slot": (text(second("free", slots=["swa 1[0]"])), "takes a call's"),
    "a full slot as an SWA slot": (
        text(second("set_full_to_swa_mapping", full_slots=[4], swa_slots=["1[0]"])),
        "with swa before it",
    ),
    "a slot as a ring": (text(second("ring_release", rings=["1[0]"])), "gave slots"),
    "a slot as a length": (
        text(second("alloc_decode", seq_lens=["1[0]"], last_loc=[-1])),
        "numbers alone",
    ),
    "marks that are numbers": (text(second("share", slots=[4], live=[1])), "true and false"),
    "a table of one list": (
        text(second("free_out_of_window", req_to_token=[4], seq_lens=[1], evicted_lens=[0])),
        "must be a list",
    ),
    "a table without rows": (
        text(second("free_out_of_window", req_to_token=[], seq_lens=[1], evicted_lens=[0])),
        "equally long lists",
    ),
    "a ragged table": (
        text(
            second("free_out_of_window", req_to_token=[[4], [4, 5]], seq_lens=[1], evicted_lens=[0])
        ),
        "rows of one length",
    ),
    "no capacity": (text([{**ALLOC, "capacity": 0}]), "capacity must be an integer from 1"),
    "a huge capacity": (text([{**ALLOC, "capacity": 2**31 - 1}]), "capacity must be an integer"),
    "many huge capacities": (
        text([{**ALLOC, "call": n, "capacity": 2**20} for n in (1, 2)]),
        "smaller capacities",
    ),
    "a state to come": (text(second("free_swa", slots=[4], as_of=2)), "from 0 to 1, got 2"),
    "an owner without a name": (text([{**ALLOC, "owner": 7}]), "owner must be printable"),
    "an owner with a long name": (text([{**ALLOC, "owner": "x" * 101}]), "at most 100 letters"),
    "an owner who steers a terminal": (text([{**ALLOC, "owner": "a\nb"}]), "printable"),
    "one number left": (text([{**ALLOC, "left": [1]}]), "left must be"),
    "less than nothing left": (text([{**ALLOC, "left": [1, -1]}]), "left must be an integer"),
    "left a number": (text([{**ALLOC, "left": 3}]), "left must be"),
    "ok without left": (text([{**ALLOC, "ok": True}]), "without left"),
    "ok a number": (text([{**ALLOC, "left": [1, 1], "ok": 1}]), "ok must be"),
    "unknown misuse": (text([{**ALLOC, "left": [1, 1], "faults": {"x": 1}}]), "counts by kind"),
    "misuse that is a list": (text([{**ALLOC, "left": [1, 1], "faults": []}]), "counts by kind"),
    "misuse below 0": (
        text([{**ALLOC, "left": [1, 1], "faults": {"unmapped": -1}}]),
        "faults: unmapped must be",
    ),
    "many calls": (text([{"call": n, "name": "clear"} for n in range(1, 10_002)]), "10000 calls"),
    "long looks": (
        text(
            [{"call": n, "name": "clear"} for n in range(1, 3000)],
            config={"full_tokens": 2**20, "swa_tokens": 2**20},
        ),
        "too long",
    ),
    "many shapes": (
        text([{"call": n, "name": "free", "slots": [0] * n} for n in range(1, 300)]),
        "differ in shape",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line(name, tmp_path):
    content, words = BAD[name]
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words) as raised:
        debug.load(path)
    message = str(raised.value)
    assert message.startswith(f"{path} is no program: ")
    assert len(message) < 800 + len(str(path))
    assert message.isprintable()


def test_a_file_too_long_is_not_read(tmp_path):
    with (tmp_path / "long.json").open("wb") as stream:
        stream.truncate(2**40)  # a hole: it takes no room
    with pytest.raises(ValueError, match="longer than"):
        debug.load(tmp_path / "long.json")
    with pytest.raises(FileNotFoundError):
        debug.load(tmp_path / "none.json")


def test_a_program_that_could_not_be_loaded_is_not_saved(tmp_path):
    program = debug.Program(swa.PoolConfig(32, 32, 4), (debug.Call("free", {"slots": [2**31]}),))
    with pytest.raises(ValueError, match="int32"):
        debug.save(program, tmp_path / "p.json")
    with pytest.raises(ValueError, match="int32"):
        debug.run(program)
    with pytest.raises(ValueError, match="must be a PoolConfig"):
        check_program(dataclasses.replace(program, config=3))
    with pytest.raises(ValueError, match="no such call"):
        check_program(dataclasses.replace(program, calls=("alloc",)))
    with pytest.raises(ValueError, match="cannot be written"):
        debug.save(dataclasses.replace(program, calls=()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_timeline_keeps_only_what_there_is_room_for(monkeypatch):
    program = debug.Program(swa.PoolConfig(32, 32, 4), (debug.Call("clear"),) * 3)
    monkeypatch.setattr("swa_jax.debug.timeline.MOST_KEPT_BYTES", 100)
    with pytest.raises(ValueError, match="first_failure"):
        debug.run(program)


def test_limits_leave_room_for_what_a_test_records():
    assert limits.MOST_FILE_BYTES >= 2**20


# Whatever is changed in a file that is good: it is read, or refused by a ValueError.
@settings(max_examples=300)
@given(st.data())
def test_a_spoiled_file_is_read_or_refused(data):
    raw = bytearray(data.draw(st.sampled_from([path.read_bytes() for path in FILES])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["byte", "cut", "twice", "number"]))
        if how == "byte":
            raw[at] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del raw[at : at + data.draw(st.integers(1, 40))]
        elif how == "twice":
            raw[at:at] = raw[at : at + 40]
        else:
            raw[at : at + 1] = data.draw(st.sampled_from([b"-1", b"99999999999", b"1e5", b"null"]))
        if not raw:
            return
    try:
        program = from_text(bytes(raw))
    except ValueError:
        return
    assert from_text(as_text(program)) == program


def test_a_name_that_comes_twice_is_found_at_once():
    names = ", ".join(f'"k{i}": 0' for i in range(20_000))
    with pytest.raises(ValueError, match="'k19999' is given twice"):
        from_text(f'{{{names}, "k19999": 1}}')


def test_a_number_of_thousands_of_digits_is_refused_in_our_words():
    with pytest.raises(ValueError, match="a number of 5000 digits is none that int32 holds"):
        from_text(f'{{"version": {"9" * 5000}}}')
