"""What the compiler makes of a transition: in place, once a shape, on every platform."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

import swa_jax as swa

CONFIGS = {
    "hybrid": swa.PoolConfig(4096, 2048, 16, 64),
    "page1": swa.PoolConfig(256, 128, 1, 64),
    "pure": swa.PoolConfig.pure_swa(2048, 16, 64),
}
B, T = 8, 64


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


CALLS = {
    "alloc": (lambda s, n: swa.alloc(s, n, capacity=T), (ints(),)),
    "alloc_extend": (
        lambda s, a, b, c: swa.alloc_extend(s, a, b, c, capacity=T),
        (ints(B), ints(B), ints(B)),
    ),
    "alloc_extend_swa_tail": (
        lambda s, a, b, c, d: swa.alloc_extend_swa_tail(s, a, b, c, d, capacity=T),
        (ints(B), ints(B), ints(B), ints(B)),
    ),
    "alloc_decode": (swa.alloc_decode, (ints(B), ints(B))),
    "free": (swa.free, (ints(T),)),
    "free_swa": (swa.free_swa, (ints(T),)),
    "free_full": (swa.free_full, (ints(T),)),
    "free_segment": (swa.free_segment, (ints(T),)),
    "free_swa_segment": (swa.free_swa_segment, (ints(T),)),
    "free_swa_grouped": (swa.free_swa_grouped, (ints(T),)),
    "free_group_begin": (swa.free_group_begin, ()),
    "free_group_end": (swa.free_group_end, ()),
    "free_out_of_window": (
        lambda s, t, n, e: swa.free_out_of_window(s, t, n, e, max_pages=2),
        (ints(B, 32), ints(B), ints(B)),
    ),
    "set_full_to_swa_mapping": (swa.set_full_to_swa_mapping, (ints(T), ints(T))),
    "clear_full_to_swa_mapping": (swa.clear_full_to_swa_mapping, (ints(T),)),
    "share": (swa.share, (ints(T),)),
    "copy_on_write": (swa.copy_on_write, (ints(B), ints(B))),
    "clear": (swa.clear, ()),
}
TWO_POOLS = {"set_full_to_swa_mapping", "clear_full_to_swa_mapping"}


def cases():
    for kind, config in CONFIGS.items():
        for name, (call, args) in CALLS.items():
            if not (config.pure_swa_pool and name in TWO_POOLS):
                yield pytest.param(config, call, args, id=f"{name}-{kind}")


def state_of(config):
    return jax.eval_shape(lambda: swa.init(config))


@pytest.mark.parametrize(("config", "call", "args"), list(cases()))
def test_every_state_buffer_is_reused_when_donated(config, call, args):
    if call is swa.clear:
        pytest.skip("a new state reads nothing of the old one")
    state = state_of(config)
    module = jax.jit(call, donate_argnums=0).lower(state, *args).compile()
    # Scalars that become a constant (a closed group, say) have nothing to reuse.
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    memory = module.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= size


LARGE = {
    "page16": swa.PoolConfig(2**18, 2**17, 16, 64),
    "page1": swa.PoolConfig(2**15, 2**14, 1, 64),
    "pure": swa.PoolConfig.pure_swa(2**16, 16, 64),
}
# These two read the whole mapping once and say so.
WHOLE = {"set_full_to_swa_mapping", "clear"}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in WHOLE])
def test_no_transition_copies_an_array_of_the_pool(name, kind):
    """A copy is what XLA adds where an array is read after it was written."""
    config, (call, args) = LARGE[kind], CALLS[name]
    if config.pure_swa_pool and name in TWO_POOLS:
        pytest.skip("needs two pools")
    state = state_of(config)
    text = jax.jit(call, donate_argnums=0).lower(state, *args).compile().as_text() or ""
    sizes = {str(leaf.size) for leaf in jax.tree.leaves(state) if leaf.size > 1000}
    copied = re.findall(r"\w+\[(\d+)\]\S* copy\(", text)
    assert not sizes & set(copied)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("name", CALLS)
def test_every_transition_lowers_for_every_platform(name, platform):
    call, args = CALLS[name]
    lowered = export.export(jax.jit(call), platforms=[platform])(state_of(CONFIGS["hybrid"]), *args)
    assert lowered.platforms == (platform,)


def primitives(jaxpr, found=None):
    found = set() if found is None else found
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for param in equation.params.values():
            for inner in param if isinstance(param, list | tuple) else [param]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    primitives(inner, found)
    return found


def test_primitives_are_found_in_inner_programs():
    def looped(x):
        return jax.jit(lambda y: jax.lax.fori_loop(0, y, lambda i, z: z + i, y))(x)

    assert "while" in primitives(jax.make_jaxpr(looped)(3).jaxpr)


@pytest.mark.parametrize(("config", "call", "args"), list(cases()))
def test_no_transition_loops_or_asks_the_host(config, call, args):
    found = primitives(jax.make_jaxpr(call)(state_of(config), *args).jaxpr)
    callbacks = {"pure_callback", "io_callback", "debug_callback"}
    assert not found & ({"while", "scan", "cond"} | callbacks)


def test_one_trace_for_a_shape():
    traces = 0

    def decode(state, lens, last):
        nonlocal traces
        traces += 1
        return swa.alloc_decode(state, lens, last)

    step = jax.jit(decode)
    state = swa.init(CONFIGS["hybrid"])
    for length in range(1, 5):
        last = jnp.full(B, -1 if length == 1 else 0, jnp.int32)
        state, _ = step(state, jnp.full(B, length, jnp.int32), last)
    assert traces == 1


def test_nothing_crosses_to_the_host_in_a_loop():
    state = swa.init(CONFIGS["hybrid"])
    lens, last = jnp.zeros(B, jnp.int32), jnp.full(B, -1, jnp.int32)

    @jax.jit
    def run(state, lens, last):
        def body(carry, _):
            state, lens, last = carry
            state, grant = swa.alloc_decode(state, lens + 1, last)
            return (state, lens + 1, grant.slots), grant.ok

        return jax.lax.scan(body, (state, lens, last), None, length=40)

    run(state, lens, last)
    with jax.transfer_guard("disallow"):
        (state, lens, last), ok = run(state, lens, last)
    assert bool(ok.all())
    swa.check(state)


def test_a_donated_state_is_gone_and_a_snapshot_is_not():
    state = swa.init(CONFIGS["hybrid"])
    kept = swa.snapshot(state)
    after, _ = jax.jit(lambda s: swa.alloc(s, 16, capacity=16), donate_argnums=0)(state)
    assert state.full.holders.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        swa.full_available_size(state).block_until_ready()
    assert int(swa.full_available_size(kept)) == 4096
    assert int(swa.full_available_size(after)) == 4080


def test_the_largest_pools_trace():
    config = swa.PoolConfig(2**31 - 2, 2**31 - 2)
    state = state_of(config)
    for name, (call, args) in CALLS.items():
        if name == "free_out_of_window":
            continue  # needs a window
        after = jax.eval_shape(call, state, *args)
        leaves = jax.tree.leaves(after)
        assert all(leaf.dtype in (jnp.int32, jnp.bool_) for leaf in leaves), name


def test_the_configuration_is_structure_not_data():
    state = state_of(CONFIGS["hybrid"])
    other = dataclasses.replace(CONFIGS["hybrid"], sliding_window=32)
    assert jax.tree.structure(state) != jax.tree.structure(state_of(other))
    assert all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(state))


def test_independent_allocators_on_two_devices():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("data")
    config = CONFIGS["hybrid"]
    states = jax.vmap(lambda _: swa.init(config))(jnp.arange(2))
    lens = jnp.array([[5, 40], [17, 0]], jnp.int32)

    def serve(states, lens):
        def one(state, lens):
            nothing = jnp.zeros_like(lens)
            state, grant = swa.alloc_extend(state, nothing, lens, nothing - 1, capacity=T)
            state = swa.free_swa(state, grant.slots[:1])
            return state, grant

        return jax.vmap(one)(states, lens)

    across = jax.jit(jax.shard_map(serve, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec)))
    right = serve(states, lens)
    got = across(*jax.device_put((states, lens), jax.NamedSharding(mesh, spec)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        assert jnp.array_equal(a, jax.device_put(b, a.sharding))
    swa.check(got[0])
    assert swa.faults(got[0])["double_free"] == 0


def test_refusals_can_be_checked_on_the_device():
    state = swa.init(CONFIGS["hybrid"])

    @jax.jit
    def step(state, count):
        after, grant = swa.alloc(state, count, capacity=4096)
        return grant.ok, swa.step_invariants(state, after, grant)

    for count, ok in ((16, True), (2064, False), (17, False), (-1, False)):
        got, laws = step(state, count)
        assert bool(got) == ok
        assert all(bool(holds) for holds in laws.values()), (count, laws)
