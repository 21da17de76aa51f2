"""The compiled replay against a plain scheduler, step by step, on loads that are short of memory.

One program is compiled for each of a few shapes; what varies is the requests.
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Sizes
from replay_checks import check_end, check_laws, check_steps, check_world
from replay_record import History, Load, Shape, recorder

SHAPES = {
    "page 1": Shape(Sizes(48, 24, 1, 6), 12, 4, 7, 40),
    "page 4": Shape(Sizes(56, 32, 4, 8), 12, 4, 12, 40),
    "page 16": Shape(Sizes(160, 96, 16, 20), 12, 4, 24, 90),
    "pure SWA": Shape(Sizes(40, 40, 4, 8, pure=True), 12, 4, 12, 60),
    "chunked": Shape(Sizes(56, 20, 4, 6, chunked=True), 12, 3, 10, 40),
    "no window": Shape(Sizes(48, 28, 4), 12, 4, 9, 28),
    "tight": Shape(Sizes(40, 12, 4, 8), 12, 3, 16, 40),
}


@st.composite
def loads(draw: st.DrawFn, shape: Shape) -> Load:
    """Requests that could each run alone, and some that are rejected, of any length."""
    prompts, outputs, rejected = [], [], set()
    for number in range(shape.requests):
        if draw(st.integers(0, 9)) == 0:
            rejected.add(number)
        final = draw(st.integers(1, shape.longest))
        prompt = draw(st.integers(1, final))
        prompts.append(prompt)
        outputs.append(draw(st.integers(0, 1)) if prompt == final else final - prompt + 1)
    return Load(prompts, outputs, frozenset(rejected))


def busy_load(shape: Shape) -> Load:
    """Short prompts that all grow long: more is admitted than can stay."""
    prompts = [1 + number % 5 for number in range(shape.requests)]
    return Load(prompts, [shape.longest - prompt + 1 for prompt in prompts])


def check_agrees(shape: Shape, load: Load) -> History:
    history, expected = recorder(shape)(load), recorder(shape).expect(load).run()
    figures = dataclasses.asdict(expected.figures)
    assert {name: int(getattr(history.last.tally, name)) for name in figures} == figures
    assert history.ended
    assert history.lengths == expected.lengths
    return history


@pytest.mark.parametrize("name", SHAPES)
@given(data=st.data())
def test_agrees_with_the_plain_scheduler(name, data):
    shape = SHAPES[name]
    load = data.draw(loads(shape))
    history = check_agrees(shape, load)
    check_laws(history)
    check_steps(load, history)
    check_end(shape, load, history)
    for index in range(0, len(history), data.draw(st.integers(1, 5))):
        check_world(shape, history.at(index))


@pytest.mark.parametrize("name", SHAPES)
def test_retractions_lose_no_page(name):
    shape = SHAPES[name]
    load = busy_load(shape)
    history = check_agrees(shape, load)
    assert int(history.last.tally.retracted) > 1
    assert int(history.last.tally.recomputed) > 0
    check_laws(history)
    check_steps(load, history)
    check_end(shape, load, history)
    for index in range(len(history)):
        check_world(shape, history.at(index))


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("name", ["page 1", "page 4", "pure SWA", "chunked"])
def test_requests_that_decode_nothing(name, output):
    shape = SHAPES[name]
    history = check_agrees(shape, Load([9] * shape.requests, [output] * shape.requests))
    assert max(max(tokens.values(), default=0) for tokens in history.lengths) == 9
    assert int(history.last.tally.completed) == shape.requests


def test_prompts_of_one_token_and_of_the_whole_pool():
    shape = SHAPES["tight"]
    prompts = [1, 40] * 6  # 40 tokens are all full pages, and more than three SWA pools
    load = Load(prompts, [1] * shape.requests)
    history = check_agrees(shape, load)
    check_end(shape, load, history)
    assert int(history.last.tally.peak_full) == shape.sizes.full_pages
    assert int(history.last.tally.peak_swa) == shape.sizes.swa_pages


def test_nobody_accepted():
    shape = SHAPES["page 4"]
    everyone = frozenset(range(shape.requests))
    load = Load([3] * shape.requests, [3] * shape.requests, everyone)
    history = check_agrees(shape, load)
    assert len(history) == 0
    check_end(shape, load, history)


def test_one_accepted_among_rejected():
    """What is rejected may be of any size: it never touches a page."""
    shape = SHAPES["page 4"]
    load = Load(
        [2**31 - 1] * 7 + [5] + [1000] * 4, [1] * 7 + [4] + [1] * 4, frozenset(set(range(12)) - {7})
    )
    history = check_agrees(shape, load)
    assert history.lengths == [{7: 5}, {7: 6}, {7: 7}, {7: 8}, {}]
    check_end(shape, load, history)
