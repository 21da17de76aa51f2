"""Ranks over the devices of a mesh, in a process that has several: run as a script.

python tests/data_parallel_child.py [PROCESSES PROCESS PORT]
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import swa_jax as swa
from swa_jax import prefix_cache as pc
from swa_jax.data_parallel import each_rank, loads, new_ranks

CONFIG = swa.PoolConfig(256, 128, 4, 16)
RANKS, STEPS = 8, 12
COLLECTIVES = re.compile(r"all-(reduce|gather|to-all)|collective|reduce-scatter|\b(send|recv)\(")


def serve(state, cache, lens, tokens):
    """Prefill, decode, leave the window, cache, free: one rank's requests, all different."""
    batch = lens.shape[0]
    nothing = jnp.zeros_like(lens)
    state, grant = swa.alloc_extend(state, nothing, lens, nothing - 1, capacity=64)
    start = jnp.cumsum(lens) - lens
    place = jnp.arange(32, dtype=jnp.int32)
    slots = grant.slots[jnp.minimum(start[:, None] + place, 63)]
    table = jnp.where(place < lens[:, None], slots, 0)
    row = jnp.arange(batch)

    def step(carry, _):
        state, table, lens = carry
        state, grant = swa.alloc_decode(state, lens + 1, table[row, lens - 1])
        table = table.at[row, lens].set(grant.slots)
        state, _ = swa.free_out_of_window(state, table, lens + 1, jnp.zeros_like(lens))
        return (state, table, lens + 1), grant.ok

    (state, table, lens), ok = jax.lax.scan(step, (state, table, lens), None, length=STEPS)
    cache, state, got = pc.insert(cache, state, tokens, lens[0], table[0])
    kept = jnp.where(place < got.length, 0, table[0])
    state = swa.free(state, table.at[0].set(kept).reshape(-1))
    return state, cache, (ok.all(), got.length)


def work():
    lens = np.arange(RANKS)[:, None] % 5 + np.array([[3, 9]])
    tokens = np.arange(RANKS)[:, None] * 100 + np.arange(32)[None]
    return jnp.asarray(lens, jnp.int32), jnp.asarray(tokens, jnp.int32)


def main(processes=1, process=0, port=0):
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    assert len(jax.devices()) == RANKS, jax.devices()
    mesh = jax.make_mesh((RANKS,), ("data",))
    spread = NamedSharding(Mesh(mesh.devices, mesh.axis_names), PartitionSpec("data"))
    states = new_ranks(lambda: swa.init(CONFIG), RANKS, mesh=mesh)
    caches = new_ranks(lambda: pc.init(CONFIG), RANKS, mesh=mesh)
    assert all(
        leaf.sharding.is_equivalent_to(spread, leaf.ndim) for leaf in jax.tree.leaves(states)
    )
    given = [jax.make_array_from_callback(x.shape, spread, lambda at, x=x: x[at]) for x in work()]

    compiled = jax.jit(each_rank(serve, mesh=mesh)).lower(states, caches, *given).compile()
    found = COLLECTIVES.search(compiled.as_text() or "")
    assert found is None, found
    across = compiled(states, caches, *given)

    alone = jax.jit(each_rank(serve))(
        new_ranks(lambda: swa.init(CONFIG), RANKS),
        new_ranks(lambda: pc.init(CONFIG), RANKS),
        *work(),
    )
    for got, right in zip(jax.tree.leaves(across), jax.tree.leaves(alone), strict=True):
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(right)[shard.index])
    if processes == 1:
        swa.check(across[0])
        assert bool(across[2][0].all())
        room = loads(across[0], across[1])
        assert int(room.full_room.min()) == CONFIG.full_tokens
        assert int(room.busy.max()) == 0
        replicas_agree(spread.mesh)
    print("ranks agree")


def replicas_agree(mesh):
    """A state that every device of a tensor-parallel group has a copy of stays the same bits."""
    whole = NamedSharding(mesh, PartitionSpec())
    lens, tokens = (x[3] for x in work())
    given = jax.device_put((swa.init(CONFIG), pc.init(CONFIG), lens, tokens), whole)
    state, cache, _ = jax.jit(serve)(*given)
    for leaf in jax.tree.leaves((state, cache)):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == RANKS
        assert all(np.array_equal(copies[0], copy) for copy in copies)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
