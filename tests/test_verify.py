"""Which drafts are right, and where a row's text ends: beside plain Python, for many trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swa_jax.serving.verify import DraftTree, cut, verify

TREES = [(-1,), (-1, 0, 1), (-1, -1, -1), (-1, 0, -1, 2, 0)]
ROWS = 6


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, 0, 3), (-2,)])
def test_a_draft_continues_an_earlier_one(parents):
    with pytest.raises(ValueError, match="must continue an earlier draft or -1"):
        DraftTree.of(parents)


@pytest.mark.parametrize("parents", TREES)
def test_a_tree_says_who_continues_whom(parents):
    tree = DraftTree.of(parents)
    lines = [[0]]  # of each node: the nodes from the last known token to it
    for place, parent in enumerate(parents, 1):
        lines.append([*lines[parent + 1], place])
    assert tree.depths.tolist() == [len(line) - 1 for line in lines]
    seen = [[node in line for node in range(len(lines))] for line in lines]
    assert tree.mask.tolist() == seen
    assert tree.is_chain == (parents == tuple(range(-1, len(parents) - 1)))


@pytest.mark.parametrize("parents", TREES)
def test_the_path_goes_on_as_long_as_a_draft_is_right(parents):
    tree = DraftTree.of(parents)
    rng = np.random.default_rng(len(parents))
    check = jax.jit(lambda *arrays: vars(verify(tree, *arrays)))
    for _ in range(20):
        drafts = rng.integers(0, 2, (ROWS, len(parents)))
        given = rng.integers(0, 2, (ROWS, len(parents) + 1))
        has = rng.random(ROWS) < 0.8
        got = check(jnp.asarray(drafts, jnp.int32), jnp.asarray(has), jnp.asarray(given, jnp.int32))
        for row in range(ROWS):
            path = [0]
            while has[row]:
                right = [
                    place
                    for place, parent in enumerate(parents, 1)
                    if parent + 1 == path[-1] and drafts[row][place - 1] == given[row][path[-1]]
                ]
                if not right:
                    break
                path.append(right[0])
            count = int(got["count"][row])
            assert got["nodes"][row, :count].tolist() == path
            gives = [int(given[row][node]) for node in path]
            assert got["tokens"][row, :count].tolist() == gives


def test_a_text_ends_with_its_room_or_its_end_token():
    tree, rng = DraftTree.of((-1, 0, 1)), np.random.default_rng(1)

    @jax.jit
    def end(drafts, given, room, ignore):
        verified = verify(tree, drafts, jnp.ones(ROWS, bool), given)
        return verified.tokens, verified.count, *cut(verified, room, (0, 3), ignore)

    for _ in range(40):
        drafts = jnp.asarray(rng.integers(0, 4, (ROWS, 3)), jnp.int32)
        given = jnp.asarray(rng.integers(0, 4, (ROWS, 4)), jnp.int32).at[:3, :3].set(drafts[:3])
        room, ignore = rng.integers(1, 6, ROWS), rng.random(ROWS) < 0.3
        gives, most, counts, stops = end(
            drafts, given, jnp.asarray(room, jnp.int32), jnp.asarray(ignore)
        )
        for row in range(ROWS):
            tokens = gives[row].tolist()[: min(int(most[row]), int(room[row]))]
            ends = [place for place, token in enumerate(tokens) if token in (0, 3)]
            if ends and not ignore[row]:
                tokens = tokens[: ends[0] + 1]
            assert int(counts[row]) == len(tokens)
            assert bool(stops[row]) == bool(ends and not ignore[row])
