"""swa_jax as a host loop calls it: one jitted transition a call, the state donated."""

import jax
import numpy as np

import swa_jax as swa
from swa_jax.bench.side import BySlots
from swa_jax.bench.workload import Point

_EXTEND = jax.jit(swa.alloc_extend, donate_argnums=0, static_argnames="capacity")
_EXTEND_TAIL = jax.jit(swa.alloc_extend_swa_tail, donate_argnums=0, static_argnames="capacity")
_DECODE = jax.jit(swa.alloc_decode, donate_argnums=0)
_FREE = jax.jit(swa.free, donate_argnums=0)
_FREE_SWA = jax.jit(swa.free_swa, donate_argnums=0)
_FREE_FULL = jax.jit(swa.free_full, donate_argnums=0)
_FREE_SEGMENT = jax.jit(swa.free_segment, donate_argnums=0)
_FREE_SWA_SEGMENT = jax.jit(swa.free_swa_segment, donate_argnums=0)
_BEGIN = jax.jit(swa.free_group_begin, donate_argnums=0)
_END = jax.jit(swa.free_group_end, donate_argnums=0)

_NOTHING = jax.jit(lambda state: state, donate_argnums=0)

_GIVEN_BACK = 4096  # places of one call of `give_back`: another length would compile anew


class OwnCalls(BySlots):
    """Dispatch is part of every call, and so is waiting for the result."""

    name = "swa_jax, call"
    lacks: frozenset[str] = frozenset()

    def __init__(self, tokens: int, page_size: int) -> None:
        """Both pools hold `tokens` tokens."""
        config = swa.PoolConfig(tokens, tokens, page_size=page_size)
        self.state = jax.block_until_ready(swa.init(config))
        self.last_page = tokens // page_size

    @classmethod
    def at(cls, point: Point) -> "OwnCalls":
        """For the pools of a point."""
        return cls(point.pool_tokens, point.page_size)

    def native(self, values: np.ndarray) -> jax.Array:
        """int32[N] on the device."""
        return jax.block_until_ready(jax.device_put(np.asarray(values, np.int32)))

    def numpy(self, values: jax.Array) -> np.ndarray:
        """int32[N]."""
        return np.asarray(values)

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted: full, SWA."""
        full, swa_side = swa.full_available_size(self.state), swa.swa_available_size(self.state)
        return int(full), int(swa_side)

    def faults(self) -> dict[str, int]:
        """Counted misuse; the benchmark must cause none."""
        return swa.faults(self.state)

    def extend(self, rows: tuple[jax.Array, ...], num_tokens: int) -> jax.Array:
        """Slots of the new tokens, row by row; all 0 when refused."""
        self.state, grant = _EXTEND(self.state, *rows, capacity=num_tokens)
        jax.block_until_ready(self.state)
        return jax.block_until_ready(grant.slots)

    def extend_tail(
        self, rows: tuple[jax.Array, ...], tails: jax.Array, num_tokens: int
    ) -> jax.Array:
        """As `extend`, SWA slots for the last `tails` tokens of each row."""
        self.state, grant = _EXTEND_TAIL(self.state, *rows, tails, capacity=num_tokens)
        jax.block_until_ready(self.state)
        return jax.block_until_ready(grant.slots)

    def decode(self, seq_lens: jax.Array, last: jax.Array) -> jax.Array:
        """One slot a row; all 0 when refused."""
        self.state, grant = _DECODE(self.state, seq_lens, last)
        jax.block_until_ready(self.state)
        return jax.block_until_ready(grant.slots)

    def free(self, slots: jax.Array) -> None:
        """Frees both sides."""
        self.state = jax.block_until_ready(_FREE(self.state, slots))

    def free_swa(self, slots: jax.Array) -> None:
        """Frees the SWA side."""
        self.state = jax.block_until_ready(_FREE_SWA(self.state, slots))

    def free_full(self, slots: jax.Array) -> None:
        """Frees the full side of pages whose SWA side is gone."""
        self.state = jax.block_until_ready(_FREE_FULL(self.state, slots))

    def free_segment(self, slots: jax.Array) -> None:
        """Frees both sides, one slot a page looked at."""
        self.state = jax.block_until_ready(_FREE_SEGMENT(self.state, slots))

    def free_swa_segment(self, slots: jax.Array) -> None:
        """Frees the SWA side, one slot a page looked at."""
        self.state = jax.block_until_ready(_FREE_SWA_SEGMENT(self.state, slots))

    def group_begin(self) -> None:
        """Queues the frees that follow."""
        self.state = jax.block_until_ready(_BEGIN(self.state))

    def group_end(self) -> None:
        """Releases what was queued."""
        self.state = jax.block_until_ready(_END(self.state))

    def give_back(self, heads: np.ndarray) -> None:
        """In parts of one length."""
        padded = np.pad(heads, (0, -heads.size % _GIVEN_BACK))
        for part in padded.reshape(-1, _GIVEN_BACK):
            self.free(self.native(part))

    def nothing(self) -> None:
        """Dispatch alone."""
        self.state = jax.block_until_ready(_NOTHING(self.state))
