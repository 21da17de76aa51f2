"""Prompts as keys: tokens, and the namespace they are cached in."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np

from swa_jax.compat.common.errors import MisuseError


class RadixKey:
    """Tokens together with what keeps them apart from equal ones.

    Args:
      token_ids: the tokens.
      extra_key: tenant, LoRA, salt: prefixes with another one are not seen.
      dp_rank: whose pools; None is a namespace of its own, in the pools of rank 0.
    """

    def __init__(
        self, token_ids: Sequence[int], extra_key: str | None = None, dp_rank: int | None = None
    ) -> None:
        """Keeps the tokens as they are given."""
        self.token_ids = token_ids
        self.extra_key = extra_key
        self.dp_rank = dp_rank

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __getitem__(self, index: int | slice) -> "RadixKey":
        part = self.token_ids[index] if isinstance(index, slice) else [self.token_ids[index]]
        return RadixKey(part, self.extra_key, self.dp_rank)

    def __repr__(self) -> str:
        space = f"extra_key={self.extra_key!r}, dp_rank={self.dp_rank!r}"
        return f"RadixKey({len(self)} tokens, first {list(self.token_ids[:8])}, {space})"


class KeyLike(Protocol):
    """An engine's own key has the same three fields."""

    token_ids: Sequence[int]
    extra_key: str | None
    dp_rank: int | None


def as_key(key: KeyLike | Sequence[int]) -> RadixKey:
    """An engine's key, or bare tokens, as a `RadixKey`."""
    if isinstance(key, Sequence | np.ndarray):
        return RadixKey(key)
    if not hasattr(key, "token_ids"):
        raise MisuseError(f"a key is tokens, or has token_ids, got {key!r}")
    return RadixKey(key.token_ids, key.extra_key, key.dp_rank)


def get_child_key(key: KeyLike, page_size: int = 1) -> Hashable:
    """What a node files a child under: the first page, and the namespace where it has one."""
    page = key.token_ids[0] if page_size == 1 else tuple(key.token_ids[:page_size])
    space = tuple(part for part in (key.extra_key, key.dp_rank) if part is not None)
    return (*space, page) if space else page


def child_key_fn(page_size: int) -> Callable[[KeyLike], Hashable]:
    """`get_child_key` for pages of this size."""
    return partial(get_child_key, page_size=page_size)


T = TypeVar("T", bound=Hashable)


class Names(Generic[T]):
    """Numbers for things, the same number for equal things, for as long as it is in use."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._numbers: dict[T, int] = {}
        self._things: dict[int, T] = {}
        self._spare: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, thing: T) -> int | None:
        """Its number, None if it has none."""
        return self._numbers.get(thing)

    def number(self, thing: T) -> int:
        """Its number, a new one from 1 on where it has none."""
        known = self._numbers.get(thing)
        if known is None:
            known = self._spare.pop() if self._spare else len(self._numbers) + 1
            self._numbers[thing], self._things[known] = known, thing
        return known

    def thing(self, number: int) -> T:
        """What has this number."""
        return self._things[number]

    def keep(self, numbers: Iterable[int]) -> None:
        """Forgets all things but those with these numbers; the others' are given out again."""
        kept = set(numbers)
        self._spare += [number for number in self._things if number not in kept]
        self._things = {n: thing for n, thing in self._things.items() if n in kept}
        self._numbers = {thing: number for number, thing in self._things.items()}


class PageCoding:
    """Tokens as the core's tree sees them, where the tree's pages are larger than the pools'.

    The core compares tokens by pages of the pool. So that prefixes part at the larger pages only,
    the first token of each stands for the whole page, and the others stand for nothing.

    Args:
      page_size: tokens in a page of the tree.
      pool_page_size: tokens in a page of the pools, a divisor.
    """

    def __init__(self, page_size: int, pool_page_size: int) -> None:
        """Knows no page yet."""
        self.page_size = page_size
        self.names: Names[tuple[int, ...]] | None = None
        if page_size != pool_page_size:
            self.names = Names()

    def known(self, tokens: np.ndarray) -> np.ndarray:
        """int32[T] the code of whole pages of `tokens`, up to the first page never seen."""
        return self._code(tokens, lambda names, page: names.find(page))

    def code(self, tokens: np.ndarray) -> np.ndarray:
        """int32[T] the code of whole pages of `tokens`; new pages are given numbers."""
        return self._code(tokens, lambda names, page: names.number(page))

    def _code(
        self, tokens: np.ndarray, look: Callable[[Names, tuple[int, ...]], int | None]
    ) -> np.ndarray:
        count, size = len(tokens) // self.page_size, self.page_size
        if self.names is None:
            return tokens[: count * size]
        numbers = []
        for page in tokens[: count * size].reshape(count, size).tolist():
            number = look(self.names, tuple(page))
            if number is None:
                break
            numbers.append(number)
        coded = np.zeros((len(numbers), size), np.int32)
        coded[:, 0] = numbers
        return coded.reshape(-1)

    def tokens(self, coded: np.ndarray) -> list[int]:
        """The tokens behind the code of whole pages."""
        if self.names is None:
            return coded.tolist()
        pages = [self.names.thing(number) for number in coded[:: self.page_size].tolist()]
        return [token for page in pages for token in page]
