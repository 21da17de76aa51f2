"""Checked mode: every transition of a compiled program looks at the laws after it, on the device.

    from swa_jax import checked as swa

    run = swa.checking(serve)  # as jax.jit(serve), and raises InvariantError

Everything that `swa_jax` has is here under the same name. What differs is the state: `init` gives
a `Checked`, which is carried through `scan`, `while_loop` and `cond` as a state is, and which knows
how many calls there were and who was granted each page. `owner=` with a call that grants says who:
an int32 number, or one for each row of its batch. The first call that breaks a law is named, by
its number and by its line in the program, with the law, the pages and their owners.

The checks are those of `jax.experimental.checkify`. Each looks at both pools as a whole, so a call
costs as much as passes over them: this is for tests and for hunting a bug, in small pools. Checkify
cannot look into a `while_loop` under `vmap`; a `scan`, or `vmap` alone, it can. `jax.jit(serve)` in
the place of `checking(serve)` is refused. Calls that are not compiled are checked one by one.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

import swa_jax as swa
from swa_jax.check import InvariantError, law_says
from swa_jax.config import PoolConfig
from swa_jax.debug.calls import CALLS
from swa_jax.debug.device_laws import AS_ASKED, GRANTED_ONCE, call_laws
from swa_jax.grant import Grant
from swa_jax.odd_pages import odd_pages
from swa_jax.paging import look_up, page_of
from swa_jax.pool import nowhere
from swa_jax.request_ring import RingGrant
from swa_jax.share import PageCopies
from swa_jax.state import PAD_PAGE, AllocatorState

T = TypeVar("T")
_NAMED = 6  # pages of each pool that a failure names
_NOBODY_KNOWN = -(2**31)  # owner of a page that was never granted here
_MARK = "swa_jax.checked"
_LOOKED_AT = ContextVar("looked at", default=False)  # whether `checking` traces a function
_STEP_LAWS = {
    AS_ASKED: "Laws 3 to 8: a call changes just what its description says",
    GRANTED_ONCE: "Law 3: what is handed out was nobody's",
    "all_or_nothing": "Law 2: a refused call leaves both pools as they were",
    "padding_never_granted": "Law 1: no slot of the padding page is granted",
    "granted_was_free": "Law 3: what is granted is held afterwards",
    "enough_said": "Law 2: a refusal counts misuse or says how many pages are missing",
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["state", "calls", "failed", "full_owner", "swa_owner"],
    meta_fields=[],
)
@dataclass(frozen=True, repr=False)
class Checked:
    """A state, and what is known of how it came about."""

    state: AllocatorState
    calls: jax.Array  # int32[] transitions so far
    failed: jax.Array  # bool[] one of them broke a law: the later ones are not looked at
    full_owner: jax.Array  # int32[F+1] who was granted each page last; -1 - n: the n-th call
    swa_owner: jax.Array  # int32[S+1] likewise of SWA pages, or rings

    def __repr__(self) -> str:
        """How many calls there were and whether one broke a law, and the state in words."""
        try:
            calls, failed = np.unique(self.calls).tolist(), bool(np.any(self.failed))
        except Exception:  # traced or donated; a repr must not fail
            return f"Checked (its calls are not known here)\n{self.state!r}"
        count = " to ".join(map(str, dict.fromkeys((calls[0], calls[-1])))) if calls else "0"
        word = "call" if count == "1" else "calls"
        broke = ", one of which broke a law" if failed else ""
        return f"Checked after {count} {word}{broke}\n{self.state!r}"


def init(config: PoolConfig) -> Checked:
    """A new state, as `swa_jax.init` gives it, that is looked at from here on."""
    return watch(swa.init(config))


def watch(state: AllocatorState) -> Checked:
    """A state that is looked at from here on; of pages that are held already nobody is known."""
    full, of_swa = state.full.holders.shape, state.swa.holders.shape
    nobody = jnp.int32(_NOBODY_KNOWN)
    return Checked(
        state,
        jnp.int32(0),
        jnp.zeros((), bool),
        jnp.full(full, nobody, jnp.int32),
        jnp.full(of_swa, nobody, jnp.int32),
    )


def checking(
    function: Callable[..., T],
    *,
    names: Sequence[str] | None = None,
    **how: Any,  # noqa: ANN401
) -> Callable[..., T]:
    """Compiles a function whose calls are this module's.

    Args:
      function: of any arguments and results, as `jax.jit` takes it.
      names: of the owners 0, 1, ...; without it owner 7 is "request 7".
      **how: more for `jax.jit`, such as `donate_argnums`.

    Returns:
      The function. It waits for the device, and raises `InvariantError` where a call broke a law:
      one line that names the first such call, the laws, the pages and their owners.
    """

    @functools.wraps(function)
    def looked_at(*args: Any, **kwargs: Any) -> T:  # noqa: ANN401
        mark = _LOOKED_AT.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _LOOKED_AT.reset(mark)

    compiled = jax.jit(checkify.checkify(looked_at, errors=checkify.user_checks), **how)

    def call(*args: Any, **kwargs: Any) -> T:  # noqa: ANN401
        error, result = compiled(*args, **kwargs)
        text = error.get()
        if text is not None and text.startswith(_MARK):
            raise InvariantError(_told(text, names or ()))
        error.throw()  # a check of the function's own
        return result

    return call


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """The function of that name of `swa_jax`, for a `Checked` in the place of its state."""
    if name not in swa.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = getattr(swa, name)
    if not inspect.isfunction(made) and not hasattr(made, "__wrapped__"):
        return made  # a class, or data
    return partial(_checked_call if name in CALLS else _plain_call, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *swa.__all__})


def _plain_call(name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """What reads a state reads that of a `Checked`."""
    call = getattr(swa, name)
    return call(*map(_bare, args), **_all_bare(kwargs))


def _all_bare(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: _bare(value) for key, value in kwargs.items()}


def _bare(value: object) -> Any:  # noqa: ANN401
    return value.state if isinstance(value, Checked) else value


def _checked_call(name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    checked, args = (args[0], args[1:]) if args else (kwargs.pop("state", None), ())
    if not isinstance(checked, Checked):
        raise ValueError(
            f"{name} takes a Checked here, of swa_jax.checked.init(config) or watch(state), got "
            f"{type(checked).__name__}"
        )
    kind = CALLS[name]
    owner = kwargs.pop("owner", None) if kind.hands_out or name == "share" else None
    result = _plain_call(name, checked.state, *args, **kwargs)
    after, answer = result if kind.gives is not None else (result, None)
    number = checked.calls + 1
    who = -1 - number if owner is None else jnp.asarray(owner, jnp.int32)
    given = _given(name, answer, args, kwargs, who)
    made = replace(_with_owners(checked, after, answer, given), state=after, calls=number)
    renamed = dict(kind.renamed)
    names = [renamed.get(own, own) for own in kind.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    laws = call_laws(name, checked.state, after, answer, arguments)
    made = _look(name, _line_of_caller(), checked, made, answer, laws)
    return made if answer is None else (made, answer)


def _line_of_caller() -> str:
    """Where in the program the call stands: the nearest line that is neither JAX's nor ours."""
    frame = here = sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in ("jax", "jaxlib", "swa_jax"):
        frame = frame.f_back
    frame = here if _package_of(frame) in ("jax", "jaxlib", "swa_jax") else frame
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return re.sub(r"[\s|{}]", "_", place)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


# ---- who holds what --------------------------------------------------------------------------


def _given(
    name: str, answer: object, args: tuple[Any, ...], kwargs: dict[str, Any], who: jax.Array
) -> jax.Array:
    """int32[] or int32[T] who gets each place of an answer."""
    if who.ndim == 0 or not isinstance(answer, Grant):
        return who
    if who.ndim != 1:
        raise ValueError(f"owner must be one number, or one for each row, got shape {who.shape}")
    if name == "alloc":
        raise ValueError(f"owner of alloc must be one number, got shape {who.shape}")
    if name == "alloc_decode":
        return who
    bound = inspect.signature(getattr(swa, name)).bind(None, *args, **kwargs).arguments
    new = jnp.asarray(bound["seq_lens"], jnp.int32) - jnp.asarray(bound["prefix_lens"], jnp.int32)
    places = jnp.arange(answer.slots.shape[0], dtype=jnp.int32)
    ends = jnp.cumsum(jnp.maximum(new, 0), dtype=jnp.int32)
    row = jnp.sum(places[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    return look_up(who, row, _NOBODY_KNOWN)


def _with_owners(
    checked: Checked, after: AllocatorState, answer: object, given: jax.Array
) -> Checked:
    """Notes who was granted what; what a row goes on in stays with who had it."""
    full, of_swa = checked.full_owner, checked.swa_owner
    if isinstance(answer, RingGrant):
        new = look_up(checked.state.swa.holders, answer.rings, 1) == 0
        at = jnp.where(new, answer.rings, jnp.int32(nowhere(after.swa)))
        return replace(checked, swa_owner=of_swa.at[at].set(given, mode="drop"))
    if isinstance(answer, Grant):
        slots, ids = answer.slots, jnp.broadcast_to(given, answer.slots.shape)
    elif isinstance(answer, PageCopies):
        slots = answer.target.reshape(-1)
        rows = given if given.ndim == 0 else given[:, None]
        ids = jnp.broadcast_to(rows, answer.target.shape).reshape(-1)
    else:
        return checked
    page = page_of(jnp.maximum(slots, 0), after.config.page_size)
    held = checked.state.swa if after.config.pure_swa_pool else checked.state.full
    new = (page != PAD_PAGE) & (look_up(held.holders, page, 1) == 0)
    full = full.at[jnp.where(new, page, jnp.int32(nowhere(after.full)))].set(ids, mode="drop")
    side = look_up(after.full_to_swa, page, 0)
    has = (page != PAD_PAGE) & (side != 0) & (look_up(checked.state.swa.holders, side, 1) == 0)
    of_swa = of_swa.at[jnp.where(has, side, jnp.int32(nowhere(after.swa)))].set(ids, mode="drop")
    return replace(checked, full_owner=full, swa_owner=of_swa)


# ---- looking at the laws ---------------------------------------------------------------------


class _Seen(NamedTuple):
    """What is told of odd pages: int32[_NAMED] each, -1 in unused places."""

    full: jax.Array  # page ids
    full_holders: jax.Array
    full_owner: jax.Array
    swa: jax.Array
    swa_holders: jax.Array
    swa_owner: jax.Array


def _look(
    name: str,
    where: str,
    before: Checked,
    made: Checked,
    answer: object,
    of_call: dict[str, jax.Array],
) -> Checked:
    """Checks the laws of a call that was made; `of_call` holds those of this call alone."""
    laws = dict(swa.invariants(made.state)) | of_call
    if isinstance(answer, Grant):
        laws |= swa.step_invariants(before.state, made.state, answer)
    if type(made.calls).__name__ == "DynamicJaxprTracer" and not _LOOKED_AT.get():
        raise ValueError(
            "a program whose calls are checked must be compiled by swa_jax.checked.checking(serve) "
            "in the place of jax.jit(serve); so must a lax.scan or a lax.cond of such calls"
        )
    holds = jnp.stack(list(laws.values()))
    breaks = ~before.failed & ~jnp.all(holds)
    nothing = _Seen(*(jnp.full(_NAMED, -1, jnp.int32) for _ in _Seen._fields))
    seen = jax.lax.cond(breaks, _odd, lambda _: nothing, made)
    try:
        checkify.check(
            ~breaks,
            f"{_MARK}|{name}|{where}|{','.join(laws)}|{{number}}|{{holds}}|"
            + "|".join(f"{{{field}}}" for field in _Seen._fields),
            number=made.calls,
            holds=holds.astype(jnp.int32),
            **seen._asdict(),
        )
    except Exception as error:  # of a call that is not compiled
        if not str(error).startswith(_MARK):
            raise
        raise InvariantError(_told(str(error), ())) from None
    return replace(made, failed=before.failed | breaks)


def _odd(made: Checked) -> _Seen:
    """The first pages that look wrong."""
    sides = odd_pages(made.state)
    pools = (made.state.full, made.state.swa)
    found: list[jax.Array] = []
    for odd, pool, owner in zip(sides, pools, (made.full_owner, made.swa_owner), strict=True):
        (pages,) = jnp.nonzero(odd, size=_NAMED, fill_value=odd.shape[0])
        pages = pages.astype(jnp.int32)
        known = pages < odd.shape[0]
        found += [
            jnp.where(known, pages, -1),
            look_up(pool.holders, pages, -1),
            look_up(owner, pages, _NOBODY_KNOWN),
        ]
    return _Seen(*found)


# ---- telling ---------------------------------------------------------------------------------


def _told(text: str, owners: Sequence[str]) -> str:
    """The one line for people."""
    _, name, where, laws_seen, number, holds, *seen = text.split("\n")[0].split("|")
    flags = _ints(holds)
    broken = [law for law, good in zip(laws_seen.split(","), flags, strict=True) if not good]
    laws = "; ".join(f"{law} ({_says(law)})" for law in broken)
    sides = [_ints(part) for part in seen]
    names_of = partial(_name_of, owners)
    pages = [*_pages("full page", names_of, *sides[:3]), *_pages("SWA page", names_of, *sides[3:])]
    told = f": {', '.join(pages)}" if pages else ""
    return f"call {int(number)}, {name} at {where}, broke {laws}{told}"


def _says(law: str) -> str:
    return _STEP_LAWS.get(law) or law_says(law)


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]


def _name_of(names: Sequence[str], owner: int) -> str:
    if owner == _NOBODY_KNOWN:
        return ""
    if owner < 0:
        return f"call {-1 - owner}"
    return names[owner] if owner < len(names) else f"request {owner}"


def _pages(
    kind: str,
    name_of: Callable[[int], str],
    pages: list[int],
    holders: list[int],
    owners: list[int],
) -> list[str]:
    found = []
    for page, count, owner in zip(pages, holders, owners, strict=True):
        if page < 0:
            continue
        who = name_of(owner)
        if count == 1:
            held = f"held by {who}" if who else "held"
        elif count == 0:
            held = f"released; was {who}'s" if who else "released"
        else:
            held = f"{count} holders" + (f", {who} among them" if who else "")
        found.append(f"{kind} {page} ({held})")
    return found
