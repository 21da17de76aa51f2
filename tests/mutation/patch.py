"""A small change of one source file, found by what the file says and not by line number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "swa_jax"


@dataclass(frozen=True)
class Mutant:
    """One change. `old` stands in `file` at least `nth + 1` times; that occurrence is replaced."""

    file: str  # inside the package: "prefix_cache/evict.py"
    where: str  # the function, "" for the module
    old: str
    new: str
    why: str = ""  # the known bug, for a change written by hand
    start: int = -1  # offset in the file, where a generator found it
    nth: int = 0  # of several changes that read alike
    seen_by: tuple[str, str] | None = None  # file and name of the test that is meant to see it
    says: str = ""  # in the name, for a change that is long to read

    @property
    def name(self) -> str:
        """What the change is called: the same as long as the code that it changes is."""
        again = f" #{self.nth + 1}" if self.nth else ""
        place = f"{self.file.removesuffix('.py')}:{self.where}"
        if self.why:
            return f"{place}: {self.why}"
        change = self.says or f"{flat(self.old)} => {flat(self.new)}"
        return f"{place}: {change}{again}"

    def apply(self, source: str) -> str:
        """The changed source.

        Raises:
          ValueError: `old` is not in the source, or, for a change by hand, more than once.
        """
        start = self.start
        if start < 0:
            found = source.count(self.old)
            if found != 1:
                raise ValueError(f"{self.name}: must be in {self.file} once, is {found} times")
            start = source.index(self.old)
        if not source.startswith(self.old, start):
            raise ValueError(f"{self.name}: {self.file} does not read so any more")
        return source[:start] + self.new + source[start + len(self.old) :]


def flat(code: str) -> str:
    """Code in one line."""
    return " ".join(code.split())


def source_of(file: str) -> str:
    """The text of a module of the package."""
    return (ROOT / PACKAGE / file).read_text(encoding="utf-8")
