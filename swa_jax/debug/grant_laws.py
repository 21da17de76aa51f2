"""Where granted slots lie, and what a copied page leaves: worked out on the host, row by row."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from swa_jax.debug.culprits import Broken, Pages
from swa_jax.debug.effects import View
from swa_jax.debug.play import Step

IN_ORDER = "granted_in_order"
IN_ORDER_TEXT = "Laws 5 and 7: slots are row by row in token order, each at its place of a page"
MOVED_SHARES = "copied_as_asked"
MOVED_TEXT = "Laws 3 and 7: a row's share goes over to its copy, and the answer fits it"


class _Row(NamedTuple):
    """New tokens of one row."""

    first: int  # its number in the text
    slots: list[int]
    last: int  # slot of the token before


def in_order(step: Step) -> Iterator[Broken]:
    """Each row goes on behind its last token, and begins a page where one begins.

    Args:
      step: any call.
    """
    if step.call.kind.gives != "slots" or not step.answer.ok:
        return
    size, pages, texts = step.before.config.page_size, set[int](), []
    for number, row in enumerate(_rows(step)):
        last = row.last
        for token, slot in enumerate(row.slots, start=row.first):
            fits = slot % size == token % size
            if token % size and last >= size:
                fits = slot == last + 1
            if slot and not fits:
                pages.add(slot // size)
                texts.append(f"token {token} of row {number} has slot {slot} after {last}")
            last = slot
    if texts:
        yield Broken(IN_ORDER, Pages(sorted(pages - {0}), []), "; ".join(texts[:4]))


def _rows(step: Step) -> Iterator[_Row]:
    slots, given = np.asarray(step.answer.slots).tolist(), step.arguments
    if step.call.name == "alloc":
        yield _Row(0, slots[: max(int(given["num_tokens"]), 0)], 0)
        return
    lens, last = given["seq_lens"].tolist(), given["last_loc"].tolist()
    if step.call.name == "alloc_decode":
        active = given.get("active", np.ones(len(lens), bool)).tolist()
        for row in np.flatnonzero(active).tolist():
            yield _Row(lens[row] - 1, [slots[row]], last[row])
        return
    place = 0
    for prefix, end, before in zip(given["prefix_lens"].tolist(), lens, last, strict=True):
        yield _Row(prefix, slots[place : place + end - prefix], before)
        place += end - prefix


class _Copy(NamedTuple):
    """A row that must get a page of its own."""

    row: int
    page: int  # the old one
    filled: int  # tokens in it


def copied(step: Step, before: View, after: View) -> Iterator[Broken]:
    """What `copy_on_write` gave and did.

    Args:
      step: any call.
      before: the state before it.
      after: the state after it.
    """
    if step.call.name != "copy_on_write" or not step.answer.ok:
        return
    copies, answer, size = _copies(step, before), step.answer, step.before.config.page_size
    given, texts = step.arguments["last_loc"].tolist(), []
    right_last, right_source = list(given), np.zeros_like(answer.source)
    right_target = np.zeros_like(answer.target)
    full, of_swa, mapping = (part.copy() for part in before)
    sides = dict[int, int]()
    for row, page, filled in copies:
        new, offsets = int(answer.last_loc[row]) // size, np.arange(filled)
        if not 0 < new < full.size or _held_before(step, before, new):
            texts.append(f"row {row} got no page of its own")
            continue
        right_last[row] = new * size + filled - 1
        right_source[row, :filled], right_target[row, :filled] = (
            page * size + offsets,
            new * size + offsets,
        )
        full[page] -= 1
        full[new] = 1
        sides[page] = int(mapping[page])
        mapping[new] = after.mapping[new] if sides[page] or step.before.config.pure_swa_pool else 0
        to = int(mapping[new])
        if bool(to) != bool(sides[page]) or (to and before.swa[to]):
            texts.append(f"page {new} has SWA page {to}")
        elif to:
            of_swa[to] = 1
    for page, to in sides.items():
        if to:
            of_swa[to] = min(of_swa[to], full[page])
    texts += [
        f"{name} is {got.tolist()}, and should be {right}"
        for name, got, right in (
            ("last_loc", np.asarray(answer.last_loc), right_last),
            ("source", np.asarray(answer.source), right_source.tolist()),
            ("target", np.asarray(answer.target), right_target.tolist()),
        )
        if got.tolist() != right
    ]
    wrong = (full != after.full) | (mapping != after.mapping)
    full_pages = np.flatnonzero(wrong).tolist()
    swa_pages = np.flatnonzero(of_swa != after.swa).tolist()
    if texts or full_pages or swa_pages:
        yield Broken(MOVED_SHARES, Pages(full_pages, swa_pages), "; ".join(texts[:4]))


def _held_before(step: Step, before: View, page: int) -> bool:
    """Whether a page could not be granted before the call."""
    return bool((before.swa if step.before.config.pure_swa_pool else before.full)[page])


def _copies(step: Step, before: View) -> list[_Copy]:
    """Rows whose partly filled last page others hold too; the last of its only holders keeps it."""
    size, given = step.before.config.page_size, step.arguments
    lens, last = given["seq_lens"].tolist(), given["last_loc"].tolist()
    active = given.get("active", np.ones(len(lens), bool)).tolist()
    left, found = before.full.copy(), []
    for row, (tokens, slot, takes_part) in enumerate(zip(lens, last, active, strict=True)):
        filled = max(tokens, 0) % size
        if not takes_part or not filled or slot < size:
            continue
        page = slot // size
        if page < left.size and left[page] > 1:
            left[page] -= 1
            found.append(_Copy(row, page, filled))
    return found
