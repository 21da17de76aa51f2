"""The allocator that all class interfaces drive: one state a rank, host arrays in and out."""

from dataclasses import dataclass

import jax
import numpy as np

import swa_jax as swa
from swa_jax.compat.common import calls
from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.host_arrays import host_int, host_ints, padded, room_for
from swa_jax.compat.common.types import HostInts, Plain
from swa_jax.inputs import MAX_ROWS


@dataclass(frozen=True)
class Backup:
    """States to come back to, by rank: references to what never changes."""

    states: tuple[swa.AllocatorState, ...]
    queued: tuple[tuple[np.ndarray, ...], ...]
    group_open: bool
    stamps: tuple[frozenset[object], ...]


class _Rank:
    """A state, and what the host has read of it."""

    def __init__(self, state: swa.AllocatorState) -> None:
        self.state = state
        self.kept = False  # somebody holds a reference: copy before donating
        self.sizes: tuple[int, int] | None = None
        self.mapping: np.ndarray | None = None
        self.stamps: frozenset[object] = frozenset()


class HostPools:
    """Current states by rank, and the calls that change them.

    A state is donated to each call, so a reference that is kept must come from `keep`.

    Args:
      config: the pools of one rank.
      ranks: how many independent ranks there are.
    """

    def __init__(self, config: swa.PoolConfig, ranks: int = 1) -> None:
        """Every page is free."""
        self.config = config
        self._ranks = [_Rank(swa.init(config)) for _ in range(ranks)]
        self._queued: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        self.group_open = False
        # Raise where a free, or a group of them, counted a fault; costs a look at the device each.
        self.strict = False
        self._before_group: list[dict[str, int]] | None = None

    # States: for shells that call the core themselves (a prefix cache).

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self._ranks)

    def state(self, rank: int = 0) -> swa.AllocatorState:
        """The present state, to read from; the next call may take its buffers."""
        return self._of(rank).state

    def take(self, rank: int = 0) -> swa.AllocatorState:
        """The present state for a call that may donate it. Give back what came of it with `put`.

        Also for calls that do not: what they leave unchanged is the same buffers in their result,
        which the next call here donates.
        """
        entry = self._of(rank)
        if entry.kept:
            entry.state, entry.kept = swa.snapshot(entry.state), False
        return entry.state

    def put(
        self, rank: int, state: swa.AllocatorState, sizes: tuple[int, int] | None = None
    ) -> None:
        """Makes `state` the present one. `sizes`: full and SWA tokens available, where known."""
        entry = self._of(rank)
        entry.kept = entry.kept and state is entry.state
        entry.state, entry.sizes, entry.mapping = state, sizes, None

    def keep(self, rank: int = 0) -> swa.AllocatorState:
        """The present state as a reference that stays good whatever is called afterwards."""
        entry = self._of(rank)
        entry.kept = True
        return entry.state

    def stamps(self, rank: int = 0) -> frozenset[object]:
        """What trees over these pools have set with `stamp`: a backup keeps it, a clear drops it.

        So a tree knows the state that it is of from one that it never was of.
        """
        return self._of(rank).stamps

    def stamp(self, rank: int, old: object, new: object) -> None:
        """Takes the stamp `old` away and sets `new`; None is no stamp."""
        entry = self._of(rank)
        entry.stamps = (entry.stamps | {new}) - {old, None}

    def _of(self, rank: int) -> _Rank:
        number = host_int("dp_rank", rank)
        if not 0 <= number < len(self._ranks):
            raise MisuseError(f"dp_rank must be 0 .. {len(self._ranks) - 1}, got {rank!r}")
        return self._ranks[number]

    # What the host reads.

    def sizes(self, rank: int = 0) -> tuple[int, int]:
        """Full and SWA tokens that can be granted; pages queued by a group are not among them."""
        entry = self._of(rank)
        if entry.sizes is None:
            full, of_swa = jax.device_get(calls.sizes(entry.state))
            entry.sizes = int(full), int(of_swa)
        return entry.sizes

    def mapping(self, rank: int = 0) -> np.ndarray:
        """int32[F+1] SWA page of each full page, 0 where it has none; read once a state."""
        entry = self._of(rank)
        if entry.mapping is None:
            entry.mapping = np.array(entry.state.full_to_swa)
            entry.mapping.flags.writeable = False
        return entry.mapping

    def free_pages(self, side: str, rank: int = 0) -> np.ndarray:
        """int32[n] page ids that grants will take from the "full" or the "swa" pool, in order."""
        state = self._of(rank).state
        pool = state.full if side == "full" and not self.config.pure_swa_pool else state.swa
        ring, head, count = jax.device_get((pool.ring, pool.head, pool.num_free))
        return np.roll(ring, -int(head))[: int(count)].astype(np.int32)

    def faults(self) -> dict[str, int]:
        """Misuse counted by the core, by kind, over all ranks."""
        counted = self._counted()
        return {kind: sum(one[kind] for one in counted) for kind in swa.FAULT_KINDS}

    def _counted(self) -> list[dict[str, int]]:
        return [swa.faults(entry.state) for entry in self._ranks]

    # Grants: int32[n] slots, or None where a pool is short.

    def alloc(self, need: int, rank: int = 0) -> np.ndarray | None:
        """Whole pages for `need` tokens in both pools."""
        full, of_swa = self._capacity()
        most = full if self.config.has_rings else min(full, of_swa)
        return self._alloc(calls.alloc, most, need, rank)

    def alloc_side(self, side: str, need: int, rank: int = 0) -> np.ndarray | None:
        """Whole pages for `need` tokens in one pool alone, by its slots; "full" or "swa"."""
        if self.config.pure_swa_pool:
            return self.alloc(need, rank)
        if side == "full":
            return self._alloc_full_side(need, rank)
        self._needs_pages()
        return self._alloc(calls.alloc_swa_side, self._capacity()[1], need, rank)

    def _alloc_full_side(self, need: int, rank: int) -> np.ndarray | None:
        need = self._whole_pages(need)
        if need == 0:
            return np.empty(0, np.int32)
        if need > self._capacity()[0]:
            return None
        row = np.array([[0], [need], [-1], [0]], np.int32)
        out = calls.alloc_extend_swa_tail(self.take(rank), row, capacity=room_for(need))
        return self._granted(rank, out, need)

    def _alloc(self, call: Plain, most: int, need: int, rank: int) -> np.ndarray | None:
        need = self._whole_pages(need)
        if need == 0:
            return np.empty(0, np.int32)
        if need > most:
            return None
        out = call(self.take(rank), np.int32(need), capacity=room_for(need))
        return self._granted(rank, out, need)

    def extend(
        self,
        rows: tuple[HostInts, HostInts, HostInts],
        num_tokens: int,
        rank: int = 0,
        *,
        swa_tails: HostInts = None,
    ) -> np.ndarray | None:
        """Slots for the tokens that each row adds, as `swa_jax.alloc_extend`.

        Args:
          rows: int[B] each: tokens held before, tokens held after, slot of the last token before.
          num_tokens: what the extensions add up to.
          rank: whose pools.
          swa_tails: int[B], or one for all rows, as for `swa_jax.alloc_extend_swa_tail`; by default
            all of the extension.
        """
        names = ("prefix_lens", "seq_lens", "last_loc")
        columns = [host_ints(name, column) for name, column in zip(names, rows, strict=True)]
        if swa_tails is not None:
            columns.append(_tails(swa_tails, columns))
        batch = _batch(columns, (0, 0, -1, 0)[: len(columns)])
        added = int(np.sum(batch[1].astype(np.int64) - batch[0]))
        if added != host_int("extend_num_tokens", num_tokens):
            raise MisuseError(
                f"extend_num_tokens must be what the rows add, {added} tokens, got {num_tokens}"
            )
        if added > self._capacity()[0] * 2:  # no pool holds them; a page may be filled beside it
            return None
        call = calls.alloc_extend if swa_tails is None else calls.alloc_extend_swa_tail
        out = call(self.take(rank), batch, capacity=room_for(added))
        return self._granted(rank, out, added)

    def decode(self, seq_lens: HostInts, last_loc: HostInts, rank: int = 0) -> np.ndarray | None:
        """One slot a row, as `swa_jax.alloc_decode`; `seq_lens` counts the new token."""
        lens, last = host_ints("seq_lens", seq_lens), host_ints("last_loc", last_loc)
        if len(lens) and int(lens.min()) < 1:
            raise MisuseError(f"seq_lens count the new token: at least 1, got {lens.min()}")
        out = calls.alloc_decode(self.take(rank), _batch([lens, last], (0, -1)))
        return self._granted(rank, out, len(lens))

    def _granted(
        self, rank: int, out: tuple[swa.AllocatorState, jax.Array], count: int
    ) -> np.ndarray | None:
        state, news = out
        host = np.asarray(news)
        ok, full_short, swa_short, full, of_swa = (int(one) for one in host[-calls.NEWS :])
        self.put(rank, state, (full, of_swa))
        if ok:
            return host[:count].copy()
        if full_short == 0 and swa_short == 0:
            raise MisuseError(
                "the request does not fit what is held, so evicting would not help: lengths must "
                "not shrink, and last_loc must be the slot of the last token of the prefix, in a "
                f"held page of no other row; counted so far: {self.faults()}"
            )
        return None

    def _needs_pages(self) -> None:
        if self.config.has_rings:
            raise MisuseError("the SWA side is a ring for each request: there are no SWA pages")

    def _capacity(self) -> tuple[int, int]:
        return self.config.full_tokens, self.config.swa_tokens

    def _whole_pages(self, need: int) -> int:
        need, size = host_int("need_size", need), self.config.page_size
        if need < 0 or need % size:
            raise MisuseError(
                f"need_size must be a multiple of page_size={size}, 0 or more, got {need}"
            )
        return need

    # Frees: by the names of `calls.FREES`.

    def free(self, kind: str, slots: HostInts, rank: int = 0) -> None:
        """Frees int[T] slots as `kind` says; in an open group they are queued."""
        named = host_ints("free_index", slots)
        if len(named) == 0 or (kind == "clear_mapping" and self.config.has_rings):
            return  # with rings nothing is mapped
        before = self._counted() if self.strict and not self.group_open else None
        self.put(rank, calls.FREES[kind](self.take(rank), padded(named)))
        if self.group_open and kind != "clear_mapping":
            self._queued[rank].append(named.copy())
        self._compare(before, kind)

    def _compare(self, before: list[dict[str, int]] | None, kind: str) -> None:
        """Raises where faults were counted in a rank since `before`, if that was asked for."""
        if before is None:
            return
        new: dict[str, int] = {}
        for then, now in zip(before, self._counted(), strict=True):
            for name in now:
                if now[name] > then[name]:
                    new[name] = new.get(name, 0) + now[name] - then[name]
        if new:
            raise MisuseError(
                f"{kind}: some pages were not what it takes, and stay as they were: {new}"
            )

    def free_side(self, side: str, slots: HostInts, rank: int = 0) -> None:
        """Frees int[T] slots of one pool alone; the other side stays held, and unmapped."""
        if side == "swa":
            self._needs_pages()
        self.free("free" if self.config.pure_swa_pool else f"free_{side}_side", slots, rank)

    def set_mapping(self, full_slots: HostInts, swa_slots: HostInts, rank: int = 0) -> None:
        """Maps int[T] full slots to int[T] SWA slots, page by page; see the core's call."""
        full, of_swa = host_ints("full_indices", full_slots), host_ints("swa_indices", swa_slots)
        if len(full) != len(of_swa):
            raise MisuseError(f"{len(full)} full slots cannot map to {len(of_swa)} SWA slots")
        if len(full):
            pairs = np.stack([padded(full), padded(of_swa)])
            self.put(rank, calls.set_mapping(self.take(rank), pairs))

    # Groups, backups.

    def group_begin(self) -> None:
        """Opens a group in every rank; a second begin is counted and loses nothing."""
        if not self.group_open:
            self._before_group = self._counted() if self.strict else None
        for rank in range(self.ranks):
            self.put(rank, calls.begin(self.take(rank)), self._ranks[rank].sizes)
        self.group_open = True

    def group_end(self) -> None:
        """Closes it: what was queued can be granted."""
        for rank in range(self.ranks):
            self.put(rank, calls.end(self.take(rank)))
            self._queued[rank] = []
        self.group_open = False
        before, self._before_group = self._before_group, None
        self._compare(before, "the frees of this group")

    @property
    def queued(self) -> list[list[np.ndarray]]:
        """By rank, the arrays of slots that frees in the open group named.

        Pages that a tree gives up meanwhile are queued in the state, and are not among these.
        """
        return [list(arrays) for arrays in self._queued]

    def backup(self) -> Backup:
        """All states, to come back to; nothing is copied before the next call."""
        states = tuple(self.keep(rank) for rank in range(self.ranks))
        queued = tuple(tuple(arrays) for arrays in self._queued)
        stamps = tuple(entry.stamps for entry in self._ranks)
        return Backup(states, queued, self.group_open, stamps)

    def restore(self, backup: Backup) -> None:
        """Comes back to a backup of these pools, as often as wanted.

        A tree that has changed since is not of that state and refuses to answer; see `stamps`.
        """
        if not isinstance(backup, Backup) or len(backup.states) != self.ranks:
            raise MisuseError(f"not a backup of {self.ranks} rank(s): {type(backup).__name__}")
        if any(state.config != self.config for state in backup.states):
            raise MisuseError(f"a backup of other pools: made for {backup.states[0].config}")
        for rank, state in enumerate(backup.states):
            self.put(rank, state)
            self._ranks[rank].kept = True
            self._ranks[rank].stamps = backup.stamps[rank]
        self._queued = [list(arrays) for arrays in backup.queued]
        self.group_open = backup.group_open
        counts = self.strict and self.group_open
        self._before_group = self._counted() if counts else None

    def resize(self, config: swa.PoolConfig) -> None:
        """Starts anew with pools of other sizes."""
        self.config = config
        self.clear()

    def clear(self, rank: int | None = None) -> None:
        """Gives everything back, of one rank or of all, counters too.

        All ranks at once also close an open group; one of several stays in it.
        """
        for one in range(self.ranks) if rank is None else [rank]:
            self.put(one, swa.init(self.config))
            self._ranks[one].stamps = frozenset()
            self._queued[one] = []
        self.group_open = self.group_open and rank is not None and self.ranks > 1
        if not self.group_open:
            self._before_group = None
        elif rank is not None:
            self.put(rank, calls.begin(self.take(rank)))
            if self._before_group is not None:
                self._before_group[rank] = swa.faults(self.state(rank))


def _tails(swa_tails: HostInts, columns: list[np.ndarray]) -> np.ndarray:
    """int32[B] the tails of rows whose int32[B] prefixes and lengths come first in `columns`."""
    prefixes, lengths = columns[0].astype(np.int64), columns[1].astype(np.int64)
    tails = host_ints("swa_tail_len", swa_tails)
    if len(tails) == 1:
        tails = np.repeat(tails, len(lengths))
    if not len(tails) == len(lengths) == len(prefixes):
        return tails  # `_batch` says so
    added = np.maximum(lengths - prefixes, 0)
    if ((tails < 0) | (tails > added)).any():
        raise MisuseError(
            f"swa_tail_len must be 0 .. the tokens that its row adds, got {tails.tolist()} for "
            f"rows that add {added.tolist()}"
        )
    return tails


def _batch(columns: list[np.ndarray], padding: tuple[int, ...]) -> np.ndarray:
    """int32[len(columns), room] with rows beside each other that take no part at the end."""
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise MisuseError(f"the rows of a batch must agree, got {[len(c) for c in columns]}")
    return np.stack([padded(c, value, MAX_ROWS) for c, value in zip(columns, padding, strict=True)])
