"""Numbers for namespaces: the tree tells texts apart by these, requests by salts and adapters."""

from collections.abc import Hashable, Iterable

_MOST = 2**31 - 1


class Namespaces:
    """A number for each namespace that something is cached in; 0 for the one without a name.

    One that was forgotten gets another number when it comes again: a block's hash, which the
    number is a part of, does not come to mean the text of somebody else.
    """

    def __init__(self) -> None:
        """Knows the one without a name."""
        self._numbers: dict[Hashable, int] = {(): 0}
        self._last = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, key: Hashable) -> int | None:
        """Its number, None where it has none."""
        return self._numbers.get(key)

    def number(self, key: Hashable) -> int:
        """Its number, a new one where it has none."""
        known = self._numbers.get(key)
        if known is None:
            if self._last == _MOST:
                raise OverflowError("every int32 was a namespace once: make a new manager")
            self._last = known = self._last + 1
            self._numbers[key] = known
        return known

    def keep(self, numbers: Iterable[int]) -> None:
        """Forgets all but those with these numbers."""
        kept = {0, *numbers}
        self._numbers = {key: number for key, number in self._numbers.items() if number in kept}
