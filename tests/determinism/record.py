"""The digests as they are kept, and the first one that differs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .digest import of_all
from .program import Driven, Program
from .ways import Trail

FILE = Path(__file__).parent / "recorded.json"
SHORT = 12  # hex digits of a digest that only says where a difference begins

_ABOUT = (
    "What the programs of tests/determinism come to, on every JAX, device and way of running. "
    "Written by `python -m tests.determinism --record` when a change means to change bits."
)


@dataclass(frozen=True)
class Recorded:
    """Of one program."""

    digest: str  # of all digests of all ranks
    ranks: list[Trail]  # the first SHORT digits of each


def read(file: Path = FILE) -> dict[str, Recorded]:
    """By the program's name; nothing where there is no file yet."""
    if not file.exists():
        return {}
    programs = json.loads(file.read_text(encoding="utf-8"))["programs"]
    return {
        name: Recorded(of["digest"], [rank.split() for rank in of["ranks"]])
        for name, of in programs.items()
    }


def write(trails: Mapping[str, Sequence[Trail]], file: Path = FILE) -> None:
    """Over what the file had; programs that were not run keep theirs."""
    known = read(file) | {name: recorded(of) for name, of in trails.items()}
    programs = {
        name: {"digest": of.digest, "ranks": [" ".join(rank) for rank in of.ranks]}
        for name, of in sorted(known.items())
    }
    text = json.dumps({"about": _ABOUT, "programs": programs}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def recorded(trails: Sequence[Trail]) -> Recorded:
    """What is kept of a program's digests."""
    whole = of_all([of_all(trail) for trail in trails])
    return Recorded(whole, [[digest[:SHORT] for digest in trail] for trail in trails])


def difference(
    program: Program | Driven, way: str, trails: Sequence[Trail], right: Recorded
) -> str | None:
    """The first digest that is another one than `right` has, in words; None where all agree.

    Args:
      program: that was run.
      way: how.
      trails: of all ranks or of the first ones; each whole or its beginning.
      right: what it should be.
    """
    for rank, (trail, other) in enumerate(zip(trails, right.ranks, strict=False)):
        short = [digest[:SHORT] for digest in trail]
        for at, (seen, wanted) in enumerate(zip(short, other, strict=False)):
            if seen != wanted:
                where = f"{program.name} ({way}), seed {rank}: {_where(program, at)}"
                return f"{where}: {seen}, recorded {wanted}"
        if len(short) > len(other):
            return (
                f"{program.name} ({way}), seed {rank}: {len(short)} digests, "
                f"recorded {len(other)}: it takes longer"
            )
    whole = len(trails) == len(right.ranks) and all(
        len(trail) == len(other) for trail, other in zip(trails, right.ranks, strict=True)
    )
    if whole and recorded(trails).digest != right.digest:
        return f"{program.name} ({way}): digests that differ past their first {SHORT} digits"
    if isinstance(program, Driven) and not whole:
        return f"{program.name} ({way}): {len(trails[0])} digests, recorded {len(right.ranks[0])}"
    return None


def _where(program: Program | Driven, at: int) -> str:
    if isinstance(program, Driven):
        return f"first difference in digest {at + 1}, one for each {program.every}"
    if at == 0:
        return "its inputs differ, so NumPy's words are others here: nothing can be compared"
    first, last = (at - 1) * program.every + 1, at * program.every
    return f"first difference in steps {first} to {last}"
