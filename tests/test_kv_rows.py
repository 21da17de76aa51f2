"""KV by token: any dtype and shape, and nowhere means nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swa_jax.kv_rows import read_rows, write_rows

DTYPES = ("bfloat16", "float8_e4m3fn", "uint8", "float32", "int32")
SLOTS = [2, 7, 0, -1, 1, 8, 100, -(2**31), 2**31 - 1]  # pages of 2: 0 and 1 are padding, 7 is last


def layers() -> tuple[jax.Array, ...]:
    shapes = ((4, 2, 3), (4, 2), (4, 2, 1, 2), (4, 2, 2), (4, 2))
    return tuple(jnp.zeros(s, d) for s, d in zip(shapes, DTYPES, strict=True))


def rows(count: int, start: int) -> tuple[jax.Array, ...]:
    """Small whole numbers, which every dtype holds."""

    def one(layer: jax.Array) -> jax.Array:
        shape = (count, *layer.shape[2:])
        return (jnp.arange(np.prod(shape)).reshape(shape) % 7 + start).astype(layer.dtype)

    return tuple(one(layer) for layer in layers())


def test_what_is_written_is_read_and_nowhere_stays_empty():
    new = rows(len(SLOTS), 1)
    after = write_rows(layers(), SLOTS, new)
    for layer, before in zip(after, layers(), strict=True):
        assert (layer.shape, layer.dtype) == (before.shape, before.dtype)
        by_slot = np.asarray(layer.astype(jnp.float32)).reshape(8, -1)
        assert sorted(set(np.flatnonzero(by_slot.any(axis=1)).tolist())) == [2, 7]
    for read, row in zip(read_rows(after, SLOTS), new, strict=True):
        assert (read.shape, read.dtype) == (row.shape, row.dtype)
        seen = np.asarray(read.astype(jnp.float32))
        np.testing.assert_array_equal(seen[:2], np.asarray(row.astype(jnp.float32))[:2])
        assert not seen[2:].any()


def test_no_layers_and_no_slots_are_no_trouble():
    assert read_rows((), [3]) == write_rows((), [3], ()) == ()
    after = write_rows(layers(), [], rows(0, 1))
    assert all((a == b).all() for a, b in zip(after, layers(), strict=True))
    assert [row.shape[0] for row in read_rows(layers(), [])] == [0] * len(DTYPES)


def test_wrong_rows_are_refused():
    one = layers()[:1]
    with pytest.raises(ValueError, match=r"must be bfloat16\[2, 3\], got float32\[2, 3\]"):
        write_rows(one, [2, 3], (jnp.zeros((2, 3), jnp.float32),))
    with pytest.raises(ValueError, match=r"must be bfloat16\[2, 3\], got bfloat16\[3, 3\]"):
        write_rows(one, [2, 3], (jnp.zeros((3, 3), jnp.bfloat16),))
    with pytest.raises(ValueError, match="for each of the 1 layers, got 2"):
        write_rows(one, [2], (one[0], one[0]))
    with pytest.raises(ValueError, match=r"a layer must be \[pages \+ 1, page_size, ...\]"):
        read_rows((jnp.zeros(3),), [2])
    with pytest.raises(ValueError, match="slots must be an array of 1 dimension"):
        read_rows(one, [[2]])
