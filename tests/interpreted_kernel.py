"""JAX's TPU attention kernel on a CPU, step by step in Pallas' TPU interpreter.

The interpreter of JAX 0.10.2 trips over two things that the kernel does, so it is given the same
in other words: it cannot read through a reshaped reference ('ReshapeTransform' object has no
attribute 'indices'), and calls a masked store out of bounds where the array has more rows than a
later axis is long. What is computed, copied and waited for stays the kernel's own.
"""

import contextlib
import importlib
import types

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

KERNEL = "jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel"


class Loaded:
    """The numbers of a buffer, read like a reference to them."""

    def __init__(self, values):
        self.values, self.dtype = values, values.dtype

    def __getitem__(self, index):
        return self.values[index]


class Reshapable:
    """A reference that is read before it is reshaped."""

    def __init__(self, ref):
        self.ref = ref

    def reshape(self, *shape):
        return Loaded(self.ref[...].reshape(shape))


def masked_store(ref, value, *, mask):
    ref[...] = jnp.where(mask, value, ref[...])


@contextlib.contextmanager
def interpreted_tpu_kernel():
    """Within this, ragged paged attention of 32-bit numbers runs on the CPU."""
    kernel = importlib.import_module(KERNEL)
    copies = kernel.MultiPageAsyncCopyDescriptor
    wait = copies.wait
    names = types.SimpleNamespace(**{**vars(pltpu), "store": masked_store})
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode():
        patch.setattr(copies, "wait", lambda self: Reshapable(wait(self)))
        patch.setattr(kernel, "pltpu", names)
        yield kernel
