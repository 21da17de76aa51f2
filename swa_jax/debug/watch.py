"""The first call of a program that breaks a law: which law, which pages, and whose they are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax

import swa_jax as swa
from swa_jax.check import describe as describe_state
from swa_jax.check import law_says
from swa_jax.debug.calls import DAMAGE
from swa_jax.debug.culprits import Broken, Pages, culprits
from swa_jax.debug.owners import Names, Owners, held_by
from swa_jax.debug.pages import pages_of
from swa_jax.debug.play import Step, play
from swa_jax.debug.program import Program
from swa_jax.debug.step_laws import STEP_LAWS, broken_by
from swa_jax.state import AllocatorState

MOST_PAGES = 8  # named in a text


@dataclass(frozen=True, repr=False)
class Failure:
    """The first call that broke a law.

    Its text is one line: the call, each law with what it says, the pages and who holds them.
    """

    call: int  # its number, from 1
    name: str
    owner: str | None  # of the call
    laws: Mapping[str, str]  # law -> what it says
    full_pages: tuple[int, ...]
    swa_pages: tuple[int, ...]
    owners: Owners  # after the call
    text: str

    def __str__(self) -> str:
        """One line."""
        return self.text

    def __repr__(self) -> str:
        """As for people: notebooks show it."""
        return self.text


class Watch:
    """Looks at each call of a program in turn."""

    def __init__(self) -> None:
        """Of a program that has not begun."""
        self.owners = Owners()
        self._damaged = False

    def look(self, step: Step) -> Failure | None:
        """What a call broke, None where it kept the laws.

        Args:
          step: the next one.
        """
        before = self.owners
        self.owners = before.after(step)
        found = broken_by(step)
        in_state = broken_laws(step.after)
        if step.call.name == DAMAGE:
            self._damaged = True
        elif not in_state:
            self._damaged = False
        if not self._damaged:
            found += in_state
        return _failure(step, found, before, self.owners) if found else None


def broken_laws(state: AllocatorState) -> list[Broken]:
    """The laws that a state breaks, with the pages that break them.

    Args:
      state: one state.
    """
    holds = jax.device_get(swa.invariants(state))
    return [Broken(law, culprits(law, state)) for law, good in holds.items() if not good]


def first_failure(program: Program) -> Failure | None:
    """Runs a program with the laws checked after every call, and keeps no states.

    Args:
      program: any.

    Returns:
      The first call that broke a law, None where all is well.

    Raises:
      ValueError: as for `swa_jax.debug.run`.
    """
    return next((failure for _, failure in watched(program) if failure is not None), None)


def watched(program: Program) -> Iterator[tuple[Step, Failure | None]]:
    """Runs a program and looks at each call.

    Args:
      program: any.

    Yields:
      each call that was made, and what it broke.
    """
    watch = Watch()
    for step in play(program):
        yield step, watch.look(step)


def law_text(law: str) -> str:
    """What a law says."""
    return STEP_LAWS.get(law) or law_says(law)


def _failure(step: Step, found: list[Broken], before: Owners, owners: Owners) -> Failure:
    name = step.call.name + (f" for {step.call.owner}" if step.call.owner else "")
    parts = []
    for law, pages, more in found:
        where = pages_in_words(step.after, pages, before, owners)
        told = "; ".join(text for text in (more, where) if text)
        parts.append(f"{law} ({law_text(law)}){': ' if told else ''}{told}")
    if not any(pages.full or pages.swa or more for _, pages, more in found):
        parts.append(describe_state(step.after))
    return Failure(
        call=step.number,
        name=step.call.name,
        owner=step.call.owner,
        laws={law: law_text(law) for law, _, _ in found},
        full_pages=tuple(sorted({page for one in found for page in one.pages.full})),
        swa_pages=tuple(sorted({page for one in found for page in one.pages.swa})),
        owners=owners,
        text=f"call {step.number}, {name}, broke {' | '.join(parts)}",
    )


def pages_in_words(state: AllocatorState, pages: Pages, before: Owners, now: Owners) -> str:
    """Each page with what it is and whose, such as "full page 3 (held by request 1)".

    Args:
      state: as it is now.
      pages: to name.
      before: holders before the last call; of a page that nobody holds now, they are named.
      now: holders.
    """
    read = pages_of(state)
    texts = []
    sides = (
        ("full", pages.full, read.full.status, before.full, now.full),
        ("SWA", pages.swa, read.swa.status, before.swa, now.swa),
    )
    for kind, ids, status, were, are in sides:
        for page in ids[:MOST_PAGES]:
            known = 0 <= page < len(status)
            what = str(status[page]) if known else "outside the pool"
            texts.append(f"{kind} page {page} ({_state_of(what, page, were, are)})")
        if len(ids) > MOST_PAGES:
            texts.append(f"and {len(ids) - MOST_PAGES} more {kind} pages")
    return ", ".join(texts)


def _state_of(what: str, page: int, before: Names, now: Names) -> str:
    if name := held_by(now, page):
        return f"{what} by {name}" if what == "held" else f"{what}; {name}"
    name = held_by(before, page)
    return f"{what}; was {name}'s" if name else what
