"""Laws that only a call shows: what it did, beside what it was asked for. On the host.

No law here depends on the order in which pages are granted: that is the business of the tests'
oracle. What a call takes from and gives to whom it names is worked out in `effects`.
"""

from collections.abc import Iterable, Iterator

import jax
import numpy as np

import swa_jax as swa
from swa_jax.debug.calls import DAMAGE, Kind
from swa_jax.debug.culprits import NO_PAGES, Broken, Pages
from swa_jax.debug.effects import View, view, wanted
from swa_jax.debug.grant_laws import (
    IN_ORDER,
    IN_ORDER_TEXT,
    MOVED_SHARES,
    MOVED_TEXT,
    copied,
    in_order,
)
from swa_jax.debug.outcomes import differs, outcome_of
from swa_jax.debug.own_arguments import own_arguments
from swa_jax.debug.play import Step, handed_out
from swa_jax.debug.values import MOST_INT
from swa_jax.debug.window_law import WINDOW_KEPT, WINDOW_TEXT, left_windows
from swa_jax.faults import FOREIGN
from swa_jax.grant import Grant
from swa_jax.state import PAD_PAGE, AllocatorState, init

ALL_OR_NOTHING = "all_or_nothing"
OTHERS_UNTOUCHED = "others_untouched"
GRANTED_ONCE = "granted_once"
GRANTED_MAPPING = "granted_mapping"
GRANTED_IN_FULL = "granted_in_full"
SETTLED_AT_THE_CALL = "settled_at_the_call"
AS_ASKED = "as_asked"
RECORDED = "as_recorded"
STEP_LAWS = {
    ALL_OR_NOTHING: "Law 2: a refused call leaves both pools and the mapping as they were",
    "padding_never_granted": "Law 1: no slot of the padding page is granted",
    "granted_was_free": "Law 3: what is granted is held afterwards",
    "enough_said": "Law 2: a refusal counts misuse or says how many pages are missing",
    OTHERS_UNTOUCHED: "Laws 3 and 4: only what a call names or hands out changes",
    GRANTED_ONCE: "Law 3: what is handed out was nobody's, and goes to one row",
    GRANTED_IN_FULL: "Law 2: a grant is of all the tokens that were asked for",
    GRANTED_MAPPING: "Law 7: a granted page has just the mapping that its grant gives it",
    SETTLED_AT_THE_CALL: "Law 6: what a call frees is settled at the call, in a group as well",
    WINDOW_KEPT: WINDOW_TEXT,
    AS_ASKED: "Laws 3 to 8: a call changes just what its description says, and counts its misuse",
    IN_ORDER: IN_ORDER_TEXT,
    MOVED_SHARES: MOVED_TEXT,
    RECORDED: "What came of the call when the program was recorded",
}
_WHOLE = ("free", "free_segment", "free_full")
_OF_SWA = ("free_swa", "free_swa_segment", "free_swa_grouped")
_SEGMENTS = ("free_segment", "free_swa_segment")


def broken_by(step: Step) -> list[Broken]:
    """The laws that a call broke, by what it did.

    Args:
      step: a call that was made.
    """
    if step.call.name == DAMAGE:
        return []
    before, after = view(step.before), view(step.after)
    found = [*_grant_laws(step, after), *_refusal(step, before, after)]
    if step.call.name != "clear":
        found += _others(step, before, after)
    if _ok(step):
        found += [*_once(step, before), *_in_full(step), *_mapping(step, before, after)]
    found += _settled(own_arguments(step, before.full)[0] or step, before, after)
    if not _refused_foreign(step):  # what a row named of others stays in its window
        found += left_windows(step)
    found += [*_as_asked(step, before, after), *_queues(step), *in_order(step)]
    found += [*copied(step, before, after), *_recorded(step)]
    return found


def _refused_foreign(step: Step) -> bool:
    was, now = (swa.faults(state).get(FOREIGN, 0) for state in (step.before, step.after))
    return was != now


def _ok(step: Step) -> bool:
    """Whether the call handed anything out."""
    return step.call.kind.hands_out and bool(step.answer.ok)


def _grant_laws(step: Step, after: View) -> Iterator[Broken]:
    """What `swa_jax.step_invariants` says of a grant on the device."""
    answer = step.answer
    if not isinstance(answer, Grant):
        return
    slots, size = np.asarray(answer.slots), step.before.config.page_size
    if np.any((slots != 0) & (slots // size == PAD_PAGE)):
        yield Broken("padding_never_granted", Pages([PAD_PAGE], []))
    loose = [page for page in _ids(slots, step) if not after.full[page]]
    if loose or np.any((slots < 0) | (slots // size >= after.full.size)):
        yield Broken("granted_was_free", Pages(loose, []))
    counted = swa.faults(step.after) != swa.faults(step.before)
    short = answer.full_short > 0 or answer.swa_short > 0
    if (short or counted) if answer.ok else not (short or counted):
        yield Broken(
            "enough_said", NO_PAGES, f"full_short {answer.full_short}, swa_short {answer.swa_short}"
        )


def _refusal(step: Step, before: View, after: View) -> Iterator[Broken]:
    if not step.call.kind.hands_out or step.answer.ok:
        return
    kept = ("full", "swa", "full_to_swa", "group_open", "scratch", "block_is_full", "owner_tags")
    for field in kept:
        was, now = getattr(step.before, field), getattr(step.after, field)
        if field == "owner_tags":  # what was refused is counted there
            was, now = ((tags and (tags.full, tags.heir, tags.swa)) for tags in (was, now))
        pairs = zip(jax.tree.leaves(was), jax.tree.leaves(now), strict=True)
        if any(not np.array_equal(one, other) for one, other in pairs):
            full = _differ(before.full, after.full) | _differ(before.mapping, after.mapping)
            swa_pages = _differ(before.swa, after.swa)
            yield Broken(ALL_OR_NOTHING, Pages(sorted(full), sorted(swa_pages)))
            return


def _differ(one: np.ndarray, other: np.ndarray) -> set[int]:
    return set(np.flatnonzero(one != other).tolist())


def _ids(slots: np.ndarray | None, step: Step) -> list[int]:
    """The full pages of slots that lie in the pool; padding is none."""
    if slots is None:
        return []
    config = step.before.config
    inside = (slots >= 0) & (slots < config.full_tokens + config.page_size)
    pages = np.unique(slots[inside] // config.page_size)
    return pages[pages != PAD_PAGE].tolist()


def _others(step: Step, before: View, after: View) -> Iterator[Broken]:
    """Whatever a call neither names nor hands out is as it was."""
    full, of_swa = _named(step, before)
    if _ok(step):
        given = handed_out(step.call, step.answer)
        if step.call.kind.gives == "rings":
            of_swa |= set(np.asarray(given).tolist())
        else:
            granted = _ids(given, step)
            full |= set(granted)
            of_swa |= set(after.mapping[granted].tolist())
    if step.call.name in ("alloc_extend", "alloc_extend_swa_tail", "alloc_decode"):
        # The page that a row goes on in may have got an SWA side.
        of_swa |= {int(after.mapping[page]) for page in full}
    wrong_full = _differ(before.full, after.full) | _differ(before.mapping, after.mapping)
    wrong = Pages(sorted(wrong_full - full), sorted(_differ(before.swa, after.swa) - of_swa))
    if wrong != NO_PAGES:
        yield Broken(OTHERS_UNTOUCHED, wrong)


def _named(step: Step, before: View) -> tuple[set[int], set[int]]:
    """Full pages that the arguments name, and SWA pages or rings that belong to these."""
    full: set[int] = set()
    of_swa: set[int] = set()
    for name, kind in step.call.kind.arguments.items():
        values = step.arguments.get(name)
        if values is None:
            continue
        if kind in (Kind.SLOTS, Kind.TABLE):
            full |= set(_ids(values, step))
        elif kind is Kind.SWA_SLOTS:
            of_swa |= set((values[values >= 0] // step.before.config.page_size).tolist())
        elif kind is Kind.RINGS:
            of_swa |= set(values.tolist())
    if step.call.name == "set_full_to_swa_mapping":  # setting moves
        full |= set(np.flatnonzero(np.isin(before.mapping, sorted(of_swa - {0}))).tolist())
    of_swa |= {int(before.mapping[page]) for page in full}
    earlier = step.arguments.get("as_of")
    if earlier is not None:
        of_swa |= {int(np.asarray(earlier.full_to_swa)[page]) for page in full}
    return full, of_swa


def _once(step: Step, before: View) -> Iterator[Broken]:
    """Slots handed out are distinct, and new but for the page that a row goes on in."""
    given = handed_out(step.call, step.answer)
    assert given is not None
    if step.call.kind.gives == "rings":
        old = np.isin(given, step.arguments["rings"])
        taken = given[~old & (given > 0)]
        wrong = sorted(set(taken[before.swa[taken] != 0].tolist()) | _repeated(taken))
        if wrong:
            yield Broken(GRANTED_ONCE, Pages([], wrong))
        return
    goes_on = set() if step.call.kind.gives == "copies" else set(_ids(_last(step), step))
    held = _holders(step, before)
    wrong = {page for page in _ids(given, step) if held[page] and page not in goes_on}
    size = step.before.config.page_size
    wrong |= {slot // size for slot in _repeated(given[given != 0])}
    if wrong:
        yield Broken(GRANTED_ONCE, Pages(sorted(wrong), []))


def _holders(step: Step, state: View) -> np.ndarray:
    """int32[F+1] who holds what can be granted: in a pure SWA pool a page is its SWA side."""
    return state.swa if step.before.config.pure_swa_pool else state.full


def _last(step: Step) -> np.ndarray:
    return step.arguments.get("last_loc", np.zeros(0, np.int32))


def _repeated(values: np.ndarray) -> set[int]:
    found, counts = np.unique(values, return_counts=True)
    return set(found[counts > 1].tolist())


def _in_full(step: Step) -> Iterator[Broken]:
    """As many slots as tokens were asked for; in a pure SWA pool those before a tail have none."""
    answer, given = step.answer, step.arguments
    if not isinstance(answer, Grant):
        return
    if step.call.name == "alloc":
        wanted = given["num_tokens"]
    elif step.call.name == "alloc_decode":
        rows = given["seq_lens"].size
        wanted = int(np.sum(given.get("active", np.ones(rows, bool))))
    else:
        new = given["seq_lens"].astype(np.int64) - given["prefix_lens"]
        wanted = int(np.sum(new))
    slots = np.asarray(answer.slots)
    none = step.before.config.pure_swa_pool and step.call.name == "alloc_extend_swa_tail"
    found = int(answer.count) if none else int(np.count_nonzero(slots))
    if not wanted == int(answer.count) == found:
        more = f"{wanted} tokens were asked for, count is {answer.count}, and {found} have a slot"
        yield Broken(GRANTED_IN_FULL, NO_PAGES, more)


def _mapping(step: Step, before: View, after: View) -> Iterator[Broken]:
    """Granted tokens have an SWA side, or none before a tail; new sides were nobody's."""
    if step.call.kind.gives != "slots" or step.before.config.has_rings:
        return
    slots = handed_out(step.call, step.answer)
    assert slots is not None
    bare = _before_the_tail(step, slots)
    pages, held = _ids(slots, step), _holders(step, before)
    new = [page for page in pages if not held[page]]
    without = set(_ids(slots[bare], step)) - set(_ids(slots[~bare], step))
    wrong = {page for page in pages if (page in without) == bool(after.mapping[page])}
    wrong -= {page for page in without if held[page]}  # it keeps the side that it had
    to = after.mapping[[page for page in new if after.mapping[page]]]
    inside = to[(to > 0) & (to < before.swa.size)]
    taken = inside[before.swa[inside] != 0].tolist()
    if wrong or taken:
        yield Broken(GRANTED_MAPPING, Pages(sorted(wrong), taken))


def _before_the_tail(step: Step, slots: np.ndarray) -> np.ndarray:
    """bool[T] places of an answer whose tokens lie before the page in which a tail begins."""
    bare = np.zeros(slots.shape, bool)
    if step.call.name != "alloc_extend_swa_tail":
        return bare
    size, place = step.before.config.page_size, 0
    names = ("prefix_lens", "seq_lens", "swa_tail_lens")
    columns = (step.arguments[name].tolist() for name in names)
    for prefix, seq, tail in zip(*columns, strict=True):
        begins = (seq - tail) // size * size if tail else seq
        bare[place : place + max(begins - prefix, 0)] = True
        place += seq - prefix
    return bare


def _settled(step: Step, before: View, after: View) -> Iterator[Broken]:
    """Pages that one owner alone holds are released, and unmapped, by the call that frees them."""
    full, swa_pages = set[int](), set[int]()
    for page in _freed(step):
        to = int(before.mapping[page])
        sides = before.swa[to : to + 1] if to > 0 else before.full[page : page + 1]
        alone = before.full[page] == 1 and sides.tolist() == [1]
        if not alone or (step.call.name == "free_full" and to):
            continue
        if step.call.name in _WHOLE and after.full[page]:
            full.add(page)
        if to and after.mapping[page]:
            full.add(page)
        if to and after.swa[to]:
            swa_pages.add(to)
    if full or swa_pages:
        yield Broken(SETTLED_AT_THE_CALL, Pages(sorted(full), sorted(swa_pages)))


def _freed(step: Step) -> Iterable[int]:
    """Held full pages whose both sides, or whose SWA side, a call gives back."""
    name, arguments, size = step.call.name, step.arguments, step.before.config.page_size
    if name == "free_out_of_window":
        table, start = arguments["req_to_token"], arguments["evicted_lens"]
        stride, slots = arguments.get("stride", 1), []
        for row, first, end in zip(table, start.tolist(), step.answer.tolist(), strict=True):
            slots += row[max(first, 0) // stride : max(end, 0) // stride : size // stride].tolist()
        return _ids(np.asarray(slots, np.int32), step)
    if name not in (*_WHOLE, *_OF_SWA) or "as_of" in arguments:
        return []
    slots = arguments["slots"]
    if name in _SEGMENTS:
        slots = slots[::size]
        slots = slots[slots % size == 0]
    return _ids(slots, step)


def _recorded(step: Step) -> Iterator[Broken]:
    """What came of it is what was recorded."""
    if step.call.outcome is not None:
        found = differs(step.call.outcome, outcome_of(step))
        if found:
            yield Broken(RECORDED, NO_PAGES, found)


def _as_asked(step: Step, before: View, after: View) -> Iterator[Broken]:
    """Holders, mapping and counts of misuse are what the call's description makes of them."""
    want = wanted(step, before)
    if want is None:
        return
    full = _differ(want.full, after.full) | _differ(want.mapping, after.mapping)
    swa_pages = _differ(want.swa, after.swa)
    had, has = swa.faults(step.before), swa.faults(step.after)
    right = {kind: min(n + want.faults.get(kind, 0), MOST_INT) for kind, n in had.items()}
    texts = [
        f"{kind} went from {had[kind]} to {has[kind]}, and should be {right[kind]}"
        for kind in has
        if has[kind] != right[kind]
    ]
    if full or swa_pages or texts:
        yield Broken(AS_ASKED, Pages(sorted(full), sorted(swa_pages)), "; ".join(texts))


def _queues(step: Step) -> Iterator[Broken]:
    """What is pending and whether a group is open."""
    name, before, after = step.call.name, step.before, step.after
    if name == "clear":
        fresh = init(before.config)
        pairs = zip(jax.tree.leaves(fresh), jax.tree.leaves(after), strict=True)
        if any(not np.array_equal(one, other) for one, other in pairs):
            yield Broken(AS_ASKED, NO_PAGES, "the state is not as new")
        return
    is_open = {"free_group_begin": True, "free_group_end": False}
    right = is_open.get(name, bool(before.group_open))
    if bool(after.group_open) != right:
        yield Broken(AS_ASKED, NO_PAGES, f"the free group is not {'open' if right else 'closed'}")
    texts = []
    for kind, was, now in (("full", before.full, after.full), ("SWA", before.swa, after.swa)):
        pending, released = int(was.num_pending), np.count_nonzero((was.holders > 0) & now.free)
        if name == "free_group_end":
            pending = 0
        elif (before.group_open or name == "free_swa_grouped") and _has_ring(before, kind):
            pending += int(released)
        if int(now.num_pending) != pending:
            texts.append(f"{int(now.num_pending)} {kind} pages are pending, and not {pending}")
    if texts:
        yield Broken(AS_ASKED, NO_PAGES, "; ".join(texts))


def _has_ring(state: AllocatorState, kind: str) -> bool:
    return kind == "SWA" or not state.config.pure_swa_pool
