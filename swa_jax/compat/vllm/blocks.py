"""What callers hold: blocks by their ids, which tell what the pools say of them now."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, overload

NULL_BLOCK = 0


class Facts(Protocol):
    """Who knows about the blocks of one group."""

    def ref_cnt(self, block_id: int) -> int:
        """Requests that use a block."""
        ...

    def block_hash(self, block_id: int) -> int | None:
        """The hash of the text that ends with a cached block."""
        ...

    def free_ids(self) -> list[int]:
        """Blocks that can be allocated, in the order in which they will be."""
        ...

    def get_num_free_blocks(self) -> int:
        """How many these are."""
        ...


class KVCacheBlock:
    """A block of one group. Equal where the id is equal and the pool the same.

    Attributes:
      block_id: its page; 0 is the null block.
    """

    __slots__ = ("_facts", "block_id")

    def __init__(self, block_id: int, facts: Facts) -> None:
        """Names a block; nothing is taken by that."""
        self.block_id = block_id
        self._facts = facts

    def is_of(self, facts: Facts) -> bool:
        """Whether it is a block of this pool."""
        return self._facts is facts

    @property
    def is_null(self) -> bool:
        """It stands for a block that a window has left behind."""
        return self.block_id == NULL_BLOCK

    @property
    def ref_cnt(self) -> int:
        """Requests that use it now; the null block is not counted."""
        return 0 if self.is_null else self._facts.ref_cnt(self.block_id)

    @property
    def block_hash(self) -> int | None:
        """The hash of the text up to its end, None while it is not cached."""
        return None if self.is_null else self._facts.block_hash(self.block_id)

    def __eq__(self, other: object) -> bool:
        """Two names of one block are equal."""
        if not isinstance(other, KVCacheBlock):
            return NotImplemented
        return (self.block_id, id(self._facts)) == (other.block_id, id(other._facts))

    def __hash__(self) -> int:
        """As equality has it."""
        return hash((self.block_id, id(self._facts)))

    def __repr__(self) -> str:
        """Without a look at the device."""
        return f"KVCacheBlock(block_id={self.block_id})"


class FreeBlocks:
    """What allocations take from: what nobody cached first, then what leaves the cache."""

    def __init__(self, facts: Facts) -> None:
        """A view; it holds nothing itself."""
        self._facts = facts

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return self._facts.get_num_free_blocks()

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """The blocks in the order in which they will be taken."""
        return [KVCacheBlock(block_id, self._facts) for block_id in self._facts.free_ids()]


@dataclass(frozen=True)
class KVCacheBlocks:
    """Blocks of a request, by group and in token order."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        """These blocks and then the others, group by group."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return KVCacheBlocks(tuple([*ours, *theirs] for ours, theirs in pairs))

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None: ...

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """The ids by group; with `allow_none` None where there is no block at all."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of blocks that are not cached, for the one group there is."""
        if len(self.blocks) != 1:
            raise ValueError(f"expected blocks of one group, got {len(self.blocks)} groups")
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Ids of blocks that are neither null nor cached, by group."""
        return [
            [block.block_id for block in group if not block.is_null and block.block_hash is None]
            for group in self.blocks
        ]

    def new_empty(self) -> "KVCacheBlocks":
        """No blocks, for as many groups."""
        return empty_blocks(len(self.blocks))


def empty_blocks(groups: int) -> KVCacheBlocks:
    """No blocks for each of so many groups."""
    return KVCacheBlocks(tuple(() for _ in range(groups)))


def named(ids: Iterable[int], facts: Facts) -> list[KVCacheBlock]:
    """Blocks of one group by their ids."""
    return [KVCacheBlock(block_id, facts) for block_id in ids]
