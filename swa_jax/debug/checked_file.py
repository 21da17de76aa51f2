"""What `swa-jax check` looks at: a saved program, or the directory of a saved state."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.check import InvariantError
from swa_jax.debug.files import config_as_plain, load
from swa_jax.debug.limits import shown
from swa_jax.debug.program import Program
from swa_jax.debug.watch import Failure, watched
from swa_jax.prefix_cache import PrefixCache
from swa_jax.saved_state import open_state
from swa_jax.state import AllocatorState


@dataclass(frozen=True)
class OpenedFile:
    """Something that can be checked."""

    path: Path
    content: Program | tuple[AllocatorState, PrefixCache | None]


@dataclass(frozen=True)
class CheckedFile:
    """What a check found."""

    path: Path
    what: str  # in words
    content: Program | AllocatorState
    faults: dict[str, int]  # misuse counted, by kind
    problem: str | None  # one line
    failure: Failure | None = None  # of a program

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.problem is None

    @property
    def verdict(self) -> str:
        """For a table."""
        if self.failure is not None:
            return f"broken by call {self.failure.call}"
        return "all hold" if self.ok else "FAILED"

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        plain: dict[str, Any] = {
            "file": str(self.path),
            "kind": "program" if isinstance(self.content, Program) else "saved state",
            "ok": self.ok,
            "config": config_as_plain(self.content.config),
            "faults": self.faults,
            "problem": self.problem,
        }
        if isinstance(self.content, Program):
            plain |= {"about": self.content.about, "calls": len(self.content)}
            plain["failure"] = None if self.failure is None else _as_plain(self.failure)
        return plain


def _as_plain(failure: Failure) -> dict[str, Any]:
    def owners(pages: tuple[int, ...], names: Any) -> dict[str, list[str]]:  # noqa: ANN401
        return {str(page): list(names.get(page, ())) for page in pages}

    return {
        "call": failure.call,
        "name": failure.name,
        "owner": failure.owner,
        "laws": dict(failure.laws),
        "full_pages": owners(failure.full_pages, failure.owners.full),
        "swa_pages": owners(failure.swa_pages, failure.owners.swa),
    }


def open_file(path: Path) -> OpenedFile:
    """Reads a program or a saved state.

    Args:
      path: a file, or a directory.

    Raises:
      ValueError: neither, or a bad one; says what is wrong.
    """
    try:
        return OpenedFile(path, open_state(path) if path.is_dir() else load(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{_name(path)} cannot be read: {reason}") from None
    except ImportError as error:
        raise ValueError(str(error)) from None


def _name(path: Path) -> str:
    text = os.fspath(path)
    return text if text.isprintable() else shown(text)


def check_file(file: OpenedFile, *, strict: bool) -> CheckedFile:
    """Checks it.

    Args:
      file: that was opened.
      strict: misuse is a problem as well.

    Raises:
      ValueError: a program that cannot be run.
    """
    if isinstance(file.content, Program):
        return _check_program(file.path, file.content, strict=strict)
    return _check_state(file.path, *file.content, strict=strict)


def _check_program(path: Path, program: Program, *, strict: bool) -> CheckedFile:
    what = f"program of {len(program)} call{'' if len(program) == 1 else 's'}"
    faults, unexpected = dict[str, int](), dict[str, int]()
    try:
        for step, failure in watched(program):
            for kind, count in step_faults(step.before, step.after).items():
                faults[kind] = faults.get(kind, 0) + count
                if step.call.outcome is None:
                    unexpected[kind] = unexpected.get(kind, 0) + count
            if failure is not None:
                return CheckedFile(path, what, program, faults, str(failure), failure)
    except ValueError as error:
        raise ValueError(f"{_name(path)}: {error}") from None
    problem = f"misuse was counted: {_in_words(unexpected)}" if strict and unexpected else None
    return CheckedFile(path, what, program, faults, problem)


def step_faults(before: AllocatorState, after: AllocatorState) -> dict[str, int]:
    """Misuse that a call counted, by kind."""
    was, now = swa.faults(before), swa.faults(after)
    return {kind: now[kind] - was[kind] for kind in now if now[kind] > was[kind]}


def _in_words(faults: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in faults.items())


def _check_state(
    path: Path, state: AllocatorState, cache: PrefixCache | None, *, strict: bool
) -> CheckedFile:
    what = f"saved state of {state.config.full_pages} full and {state.config.swa_units} SWA pages"
    what += "" if cache is None else f", {int(cache.in_tree.sum())} of them cached"
    faults = {kind: count for kind, count in swa.faults(state).items() if count}
    problem = None
    try:
        swa.check(state)
        if cache is not None:
            prefix_cache.check(cache, state)
    except InvariantError as error:
        problem = str(error)
    if problem is None and strict and faults:
        problem = f"misuse was counted: {_in_words(faults)}"
    return CheckedFile(path, what, state, faults, problem)
