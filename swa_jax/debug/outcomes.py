"""What comes of a call, in numbers that hold whatever the order in which pages are granted."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import swa_jax as swa
from swa_jax.debug.play import Step, play
from swa_jax.debug.program import Outcome, Program


def outcome_of(step: Step) -> Outcome:
    """What a call came to: the tokens left after it, whether it was granted, the misuse counted."""
    left = swa.full_available_size(step.after), swa.swa_available_size(step.after)
    ok = bool(step.answer.ok) if step.call.kind.hands_out else None
    was, now = swa.faults(step.before), swa.faults(step.after)
    faults = {kind: now[kind] - was[kind] for kind in now if now[kind] != was[kind]}
    return Outcome((int(left[0]), int(left[1])), ok, {} if step.call.name == "clear" else faults)


def record_outcomes(program: Program) -> Program:
    """The program with what comes of each call now, to hold later runs to.

    Args:
      program: any; outcomes that it has are replaced.

    Raises:
      ValueError: as for `swa_jax.debug.run`.
    """
    calls = tuple(replace(step.call, outcome=outcome_of(step)) for step in play(program))
    return replace(program, calls=calls)


def differs(wanted: Outcome, found: Outcome) -> str:
    """What differs between two outcomes, in words; "" where nothing does."""
    texts = []
    if tuple(found.left) != tuple(wanted.left):
        texts.append(f"{_left(wanted.left)} tokens were left, and {_left(found.left)} are")
    if wanted.ok is not None and found.ok != wanted.ok:
        texts.append(f"it was {_granted(wanted.ok)}, and is {_granted(found.ok)}")
    if _counted(found.faults) != _counted(wanted.faults):
        texts.append(f"it counted {_in_words(wanted.faults)}, and counts {_in_words(found.faults)}")
    return "; ".join(texts)


def _left(left: Iterable[int]) -> str:
    return "/".join(map(str, left))


def _granted(ok: bool | None) -> str:
    return "granted" if ok else "refused"


def _counted(faults: Mapping[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in faults.items() if count}


def _in_words(faults: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in _counted(faults).items()) or "no misuse"
