"""A short life of two requests that must keep every law: by calls, and as one program."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa

CONFIG = swa.PoolConfig(64, 32, page_size=4, sliding_window=8)
STEPS = 12  # decode steps of the life: both rows leave a page behind
LOWERED_FOR = ("cuda", "tpu")

# The state, a table of slots, int32[2] lengths, int32[2] tokens below which pages were freed.
_Carry: TypeAlias = tuple[swa.AllocatorState, jax.Array, jax.Array, jax.Array]


def self_test_parts() -> dict[str, Callable[[], str]]:
    """The parts by name; each says what was seen, or raises."""
    lowered = {f"lowering for {name}": functools.partial(_lowered, name) for name in LOWERED_FOR}
    return {"laws, by calls": _by_calls, "laws, in one program": _compiled, **lowered}


def life(
    state: swa.AllocatorState,
) -> tuple[swa.AllocatorState, jax.Array, list[dict[str, jax.Array]]]:
    """Prefill, decode behind a moving window, a shared page, a group of frees, the end.

    Args:
      state: a fresh state of `CONFIG`.

    Returns:
      The state with everything free again, bool[] whether all was granted, and the laws after
      each part.
    """
    rows = jnp.arange(2, dtype=jnp.int32)
    lens = jnp.array([6, 9], jnp.int32)
    state, grant = swa.alloc_extend(state, [0, 0], lens, [-1, -1], capacity=16)
    table = jnp.zeros((2, 32), jnp.int32)
    table = table.at[0, :6].set(grant.slots[:6], mode="drop")
    table = table.at[1, :9].set(grant.slots[6:15], mode="drop")
    laws = [swa.invariants(state)]

    def step(carry: _Carry, _: None) -> tuple[_Carry, jax.Array]:
        state, table, lens, evicted = carry
        last = table.at[rows, lens - 1].get(mode="fill", fill_value=0)
        state, grant = swa.alloc_decode(state, lens + 1, last)
        table = table.at[rows, lens].set(grant.slots, mode="drop")
        lens = lens + 1
        state, evicted = swa.free_out_of_window(state, table, lens, evicted, max_pages=1)
        return (state, table, lens, evicted), grant.ok

    start = (state, table, lens, jnp.zeros(2, jnp.int32))
    (state, table, lens, _), granted = jax.lax.scan(step, start, length=STEPS)
    laws.append(swa.invariants(state))
    state = swa.share(state, table[0, :4])
    state = swa.free(state, table[0, :4])  # one of the two who hold that page
    laws.append(swa.invariants(state))
    state = swa.free(swa.free_group_begin(state), table.reshape(-1))
    laws.append(swa.invariants(state))
    state = swa.free_group_end(state)
    laws.append(swa.invariants(state))
    return state, grant.ok & jnp.all(granted), laws


def _by_calls() -> str:
    state, granted, laws = life(swa.init(CONFIG))
    _expect_sound(state, granted, laws)
    return f"{STEPS} decode steps of 2 rows, {len(laws)} looks, nothing leaked"


def _compiled() -> str:
    state, granted, laws = jax.jit(life, donate_argnums=0)(swa.init(CONFIG))
    _expect_sound(state, granted, laws)
    for one, other in zip(
        jax.tree.leaves(state), jax.tree.leaves(life(swa.init(CONFIG))[0]), strict=True
    ):
        if not np.array_equal(np.asarray(one), np.asarray(other)):
            raise RuntimeError("compiled as one program the state differs from that of calls")
    return "the same bits as by calls, with the state donated"


def _expect_sound(
    state: swa.AllocatorState, granted: jax.Array, laws: list[dict[str, jax.Array]]
) -> None:
    for place, held in enumerate(laws):
        broken = [name for name, holds in held.items() if not bool(holds)]
        if broken:
            raise RuntimeError(f"broken at look {place}: {', '.join(broken)}")
    swa.check(state)
    if not bool(granted):
        raise RuntimeError("a grant was refused though there was room")
    left = int(swa.full_available_size(state)), int(swa.swa_available_size(state))
    if left != (CONFIG.full_tokens, CONFIG.swa_tokens):
        raise RuntimeError(f"leaked: {left} tokens are free at the end")
    faults = {kind: count for kind, count in swa.faults(state).items() if count}
    if faults:
        raise RuntimeError(f"faults were counted: {faults}")


def _lowered(platform: str) -> str:
    traced = jax.jit(life, donate_argnums=0).trace(swa.init(CONFIG))
    size = len(traced.lower(lowering_platforms=(platform,)).as_text())
    return f"{size / 1000:,.0f} kB of StableHLO"
