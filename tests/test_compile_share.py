"""What the compiler makes of sharing: in place, without loops, on every platform."""

import re

import jax
import pytest
from jax import export
from test_compile import CONFIGS, LARGE, B, T, ints, primitives, state_of

import swa_jax as swa
from swa_jax import prefix_cache as pc

CALLS = {
    "share": (swa.share, (ints(T), jax.ShapeDtypeStruct((T,), bool))),
    "copy_on_write": (swa.copy_on_write, (ints(B), ints(B))),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", LARGE)
def test_sharing_works_in_place(name, kind):
    call, args = CALLS[name]
    state = state_of(LARGE[kind])
    module = jax.jit(call, donate_argnums=0).lower(state, *args).compile()
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    memory = module.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    sizes = {str(leaf.size) for leaf in leaves if leaf.size > 1000}
    assert not sizes & set(re.findall(r"\w+\[(\d+)\]\S* copy\(", module.as_text() or ""))


@pytest.mark.parametrize("name", CALLS)
def test_sharing_neither_loops_nor_asks_the_host(name):
    call, args = CALLS[name]
    found = primitives(jax.make_jaxpr(call)(state_of(CONFIGS["hybrid"]), *args).jaxpr)
    assert not found & {"while", "scan", "cond", "pure_callback", "io_callback", "debug_callback"}
    for platform in ("cpu", "cuda", "tpu"):
        export.export(jax.jit(call), platforms=[platform])(state_of(CONFIGS["hybrid"]), *args)


def test_an_insert_that_gives_shares_up_works_in_place():
    config = LARGE["page16"]
    cache, state = jax.eval_shape(lambda: (pc.init(config), swa.init(config)))

    def insert(cache, state, tokens, length, slots, owned_from):
        return pc.insert(cache, state, tokens, length, slots, owned_from=owned_from)

    args = (ints(64), ints(), ints(64), ints())
    lowered = jax.jit(insert, donate_argnums=(0, 1)).lower(cache, state, *args)
    text = lowered.compile().as_text() or ""
    shapes = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves((cache, state))}
    copied = set(re.findall(r"\w+\[([\d,]+)\]\S* copy\(", text))
    assert not {shape for shape in shapes & copied if len(shape) > 3}
