"""The digests as they are kept, and the first one that differs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .digest import of_all
from .program import RANKS, Driven, Program
from .ways import PARTS, Trail

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
      trails: of as many ranks, and each as long, as this way gives.
      right: what it should be.
    """
    for rank, (trail, other) in enumerate(zip(trails, right.ranks, strict=False)):
        short = [digest[:SHORT] for digest in trail]
        for at, (seen, wanted) in enumerate(zip(short, other, strict=False)):
            if seen != wanted:
                where = f"{program.name} ({way}), seed {rank}: {_where(program, at)}"
                return f"{where}: {seen}, recorded {wanted}"
    other_size = size_difference(program, way, trails, right)
    if other_size is not None:
        return other_size
    if way not in PARTS and recorded(trails).digest != right.digest:
        return f"{program.name} ({way}): digests that differ past their first {SHORT} digits"
    return None


def size_difference(
    program: Program | Driven, way: str, trails: Sequence[Trail], right: Recorded
) -> str | None:
    """Seeds or digests too few or too many, in words; arguments as for `difference`."""
    ranks, length = PARTS.get(way, (None, None))
    wanted = [trail[:length] for trail in right.ranks[:ranks]]
    if len(trails) != len(wanted):
        return f"{program.name} ({way}): seeds: {len(trails)}, recorded {len(wanted)}"
    for rank, (trail, other) in enumerate(zip(trails, wanted, strict=True)):
        if len(trail) != len(other):
            where = f"{program.name} ({way}), seed {rank}"
            return f"{where}: digests: {len(trail)}, recorded {len(other)}"
    return None


def cut_short(program: Program | Driven, right: Recorded) -> str | None:
    """What a record lacks, in words: seeds, or digests of some of them."""
    ranks = 1 if isinstance(program, Driven) else RANKS
    if len(right.ranks) != ranks:
        return f"{program.name}: seeds in the record: {len(right.ranks)} of {ranks}"
    lengths = {len(trail) for trail in right.ranks}
    if len(lengths) > 1:
        return f"{program.name}: digests in the record: {min(lengths)} to {max(lengths)} a seed"
    return None


def _where(program: Program | Driven, at: int) -> str:
    if isinstance(program, Driven):
        return f"first difference in digest {at + 1}, one for each {program.every}"
    if at == 0:
        return "its inputs differ, so NumPy's words are others here: nothing can be compared"
    first, last = (at - 1) * program.every + 1, at * program.every
    return f"first difference in steps {first} to {last}"
