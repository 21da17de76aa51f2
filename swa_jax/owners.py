"""Owner tags: pages are freed, shared, mapped and filled by those they were granted to alone.

`PoolConfig(..., owner_tags=True)` turns them on. Every call that grants takes `by`, the id of who
calls, and writes it to the pages that it grants. Every call that names pages takes `by` too: what
it names of somebody else's is refused and counted as "foreign". So a stale table, a neighbour's
slots in a free, or a request that frees what a prefix cache took over is refused where it happens,
though the page is held and nothing else looks wrong.

An id is any int32. Without `by` a call is by owner 0; ids below 0 are the library's own
(`TREE_OWNER`). Forks of a request that share its pages (`share`) go by one id: they are one owner.

What a prefix cache takes over is the tree's. Where others hold such a page too, they may give up
their shares, and the last share is the tree's. Anybody may share a page of the tree, to read it and
to copy it before he writes (`copy_on_write`).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.faults import add_faults, fault_counts
from swa_jax.inputs import Ints, as_int32
from swa_jax.paging import first_places, look_up, not_alone, page_of, put
from swa_jax.plan_free import holders_here, name_pages, slots_to_pages
from swa_jax.pool import holders_of, is_held, nowhere
from swa_jax.state import PAD_PAGE, PAD_SLOT, UNMAPPED, AllocatorState, OwnerTags, must_be_state

NO_ONE_NAMED = 0  # the owner of calls that name none
TREE_OWNER = -1  # pages that a prefix cache has taken over
ANYONE = -2  # pages of the tree that others hold too: whoever names one gives up a share


def as_owner(state: AllocatorState, by: Ints | None, **column: jax.Array) -> jax.Array | None:
    """Whom a call is by: None where pages carry no tags, which compiles to nothing.

    Args:
      state: of the call.
      by: int32[] one owner for all, or int32[B] one for each place of `column`.
      column: [B] the argument of the call that is read place by place, by its name.

    Returns:
      int32[B], int32[] where no column is given, or None.

    Raises:
      ValueError: `by` for a state without tags, or of another length.
    """
    if state.owner_tags is None:
        if by is not None:
            raise ValueError(
                f"by={by!r} names an owner, and the pages of this state carry no owner tags: make "
                "it with PoolConfig(..., owner_tags=True)"
            )
        return None
    return as_ids("by", NO_ONE_NAMED if by is None else by, **column)


def as_ids(name: str, owner: Ints, **column: jax.Array) -> jax.Array:
    """Owners as a call takes them, as for `as_owner`; `name` is what the call names them."""
    if isinstance(owner, jax.Array) and not jnp.can_cast(owner.dtype, jnp.int32):
        raise ValueError(f"{name} must be int32, or two owners may become one, got {owner.dtype}")
    ids = as_int32(name, owner, None)
    if not column:
        return as_int32(name, ids, 0)
    ((of, places),) = column.items()
    if ids.shape not in ((), places.shape[:1]):
        raise ValueError(
            f"{name} must be one owner or one for each place of {of} ({places.shape[0]}), got "
            f"shape {ids.shape}"
        )
    return jnp.broadcast_to(ids, places.shape[:1])


def count_foreign(tags: OwnerTags | None, more: jax.Array | None) -> OwnerTags | None:
    """Adds int32[] to what was refused."""
    if tags is None or more is None:
        return tags
    return replace(tags, foreign=add_faults(tags.foreign, more))


def is_foreign(tags: OwnerTags, pages: jax.Array, holders: jax.Array, by: jax.Array) -> jax.Array:
    """bool[T] full pages that are somebody else's.

    Args:
      tags: of the state.
      pages: int32[T] full pages.
      holders: int32[T] how many hold each; what nobody holds is not foreign.
      by: int32[] or int32[T] owner.
    """
    owner = _owner(tags, pages, holders)
    return (holders > 0) & (owner != by) & (owner != ANYONE)


def _owner(tags: OwnerTags, pages: jax.Array, holders: jax.Array) -> jax.Array:
    """int32[...] whose full pages are that so many hold."""
    of_several = look_up(tags.full, pages, NO_ONE_NAMED)
    return jnp.where(holders > 1, of_several, look_up(tags.heir, pages, NO_ONE_NAMED))


def is_foreign_side(tags: OwnerTags, pages: jax.Array, by: jax.Array) -> jax.Array:
    """bool[T] SWA pages, or rings, with another tag. To be asked of those that are held."""
    return look_up(tags.swa, pages, NO_ONE_NAMED) != by


def keep_own(
    state: AllocatorState,
    slots: jax.Array,
    by: jax.Array | None,
    *,
    step: int = 1,
    shares: bool = False,
    one_owner: bool = False,
) -> tuple[AllocatorState, jax.Array]:
    """Takes out what `by` may not name, before a call looks at its slots.

    Args:
      state: before the call.
      slots: int32[T] full slots.
      by: int32[] or int32[T] owner, None without tags.
      step: static, only every so many-th place is looked at by the call.
      shares: static, the call adds holders, which anybody may to a page of the tree.
      one_owner: static, the call is for pages that have one owner alone, as `ANYONE` is not.

    Returns:
      The state with foreign pages counted, once a page, and the slots with 0 in their places.
    """
    tags = state.owner_tags
    if by is None or tags is None:
        return state, slots
    pages = slots_to_pages(state, slots)[0]
    holders = holders_of(state.full, pages)
    foreign = is_foreign(tags, pages, holders, by)
    if shares:
        foreign = foreign & (look_up(tags.heir, pages, NO_ONE_NAMED) != TREE_OWNER)
    if one_owner:
        foreign = foreign | ((holders > 0) & (_owner(tags, pages, holders) == ANYONE))
    return _without(state, tags, slots, foreign, pages, step)


def keep_own_as_of(
    state: AllocatorState, owner: AllocatorState, slots: jax.Array, by: jax.Array | None
) -> tuple[AllocatorState, jax.Array]:
    """As `keep_own`, by whose the SWA pages are now that the slots had in an earlier state."""
    tags = state.owner_tags
    if by is None or tags is None:
        return state, slots
    pages = slots_to_pages(state, slots)[0]
    swa_pages = look_up(owner.full_to_swa, pages, UNMAPPED)
    held = (swa_pages != UNMAPPED) & is_held(state.swa, swa_pages)
    return _without(state, tags, slots, held & is_foreign_side(tags, swa_pages, by), pages, 1)


def _without(
    state: AllocatorState,
    tags: OwnerTags,
    slots: jax.Array,
    foreign: jax.Array,
    pages: jax.Array,
    step: int,
) -> tuple[AllocatorState, jax.Array]:
    if step > 1:
        foreign = foreign & (jnp.arange(slots.shape[0], dtype=jnp.int32) % jnp.int32(step) == 0)
    named = jnp.where(foreign, pages, jnp.int32(nowhere(state.full)))
    first, _, scratch = first_places(state.scratch, named)
    counted = count_foreign(tags, jnp.sum(first & foreign, dtype=jnp.int32))
    return replace(state, owner_tags=counted, scratch=scratch), jnp.where(foreign, PAD_SLOT, slots)


def tag_pages(
    state: AllocatorState,
    pages: jax.Array,
    owner: jax.Array | int | None,
    heir: jax.Array | int | None = None,
) -> AllocatorState:
    """Writes whose int32[K] full pages are, and so their SWA sides; one past the end: none.

    Args:
      state: after the pages were granted.
      pages: full pages; PAD_PAGE is nobody's.
      owner: int32[K] or int32[], None without tags.
      heir: likewise, whose they are while one alone holds them; `owner` by default.
    """
    tags = state.owner_tags
    if owner is None or tags is None:
        return state
    ids = [jnp.asarray(who, jnp.int32) for who in (owner, owner if heir is None else heir)]
    named = jnp.where(pages == PAD_PAGE, jnp.int32(nowhere(state.full)), pages)
    tables = zip((tags.full, tags.heir), ids, strict=True)
    full, heirs = (put(table, named, jnp.broadcast_to(who, pages.shape)) for table, who in tables)
    return tag_sides(replace(state, owner_tags=replace(tags, full=full, heir=heirs)), named)


def leave_to_tree(state: AllocatorState, pages: jax.Array) -> AllocatorState:
    """Makes the tree the heir of int32[K] full pages that others hold too; PAD_PAGE: none."""
    tags = state.owner_tags
    if tags is None:
        return state
    named = jnp.where(pages == PAD_PAGE, jnp.int32(nowhere(state.full)), pages)
    heirs = put(tags.heir, named, jnp.int32(TREE_OWNER))
    return replace(state, owner_tags=replace(tags, heir=heirs))


def open_to_all(state: AllocatorState, pages: jax.Array, by: jax.Array | None) -> AllocatorState:
    """Int32[K] pages that `by` has shared: those of the tree may be given up by whoever holds them.

    Args:
      state: with the new holders.
      pages: full pages; one past the end names none.
      by: int32[K] who shares, None without tags.
    """
    tags = state.owner_tags
    if tags is None or by is None:
        return state
    trees = look_up(tags.heir, pages, NO_ONE_NAMED) == TREE_OWNER
    opens = trees & (look_up(tags.full, pages, NO_ONE_NAMED) != by)
    named = jnp.where(opens, pages, jnp.int32(nowhere(state.full)))
    opened = replace(tags, full=put(tags.full, named, jnp.int32(ANYONE)))
    return tag_sides(replace(state, owner_tags=opened), named)


def tag_sides(state: AllocatorState, pages: jax.Array) -> AllocatorState:
    """Writes that the SWA sides of int32[K] full pages are whose the pages are."""
    tags = state.owner_tags
    if tags is None or state.config.has_rings:
        return state
    sides = look_up(state.full_to_swa, pages, UNMAPPED)
    at = jnp.where(sides == UNMAPPED, jnp.int32(nowhere(state.swa)), sides)
    swa = put(tags.swa, at, look_up(tags.full, pages, NO_ONE_NAMED))
    return replace(state, owner_tags=replace(tags, swa=swa))


def whoever(state: AllocatorState, slots: jax.Array) -> jax.Array | None:
    """`by` of a call that cleans up after all: int32[T] the owners that the slots have."""
    if state.owner_tags is None:
        return None
    pages = slots_to_pages(state, slots)[0]
    return _owner(state.owner_tags, pages, holders_of(state.full, pages))


def the_tree(state: AllocatorState) -> int | None:
    """`by` of calls that a prefix cache makes for itself."""
    return None if state.owner_tags is None else TREE_OWNER


def tag_slots(state: AllocatorState, slots: jax.Array, owner: jax.Array | None) -> AllocatorState:
    """As `tag_pages`, for the pages of int32[T] slots that a grant gave; 0 names none."""
    if owner is None:
        return state
    return tag_pages(state, page_of(slots, state.config.page_size), owner)


def owner_of(state: AllocatorState, slots: Ints) -> jax.Array:
    """Whose pages are. Of a released page: whose it was.

    Args:
      state: any state with owner tags.
      slots: int32[...] full slots, of any shape.

    Returns:
      int32 of the same shape: the owner; 0 for padding and for slots outside the pool.

    Raises:
      ValueError: a state without owner tags.
    """
    must_be_state(state)
    _needs_tags(state, "owner_of")
    return _owner_of(state, as_int32("slots", slots, None))


_owner_of = jax.jit(whoever)


def hand_over(
    state: AllocatorState, slots: Ints, to: Ints, *, by: Ints | None = None
) -> AllocatorState:
    """Gives pages to another owner, their SWA sides with them.

    Args:
      state: allocator before the call.
      slots: int32[T] full slots; 0 (any slot of the padding page) in unused places.
      to: int32[] or int32[T] the new owner; the places of one page agree.
      by: int32[] or int32[T] the owner so far, 0 by default.

    Returns:
      The allocator after the call: held are the same pages. Of a page that the tree holds too, the
      other shares are the new owner's. Request rings stay whose they are.

    Refused, counted, and nothing else changed:
      foreign: a page of somebody else, or one of the tree that any other holds too (nobody can say
        whose share is meant), once a page.
      double_free: a page that nobody holds, once a page.
      out_of_range: a slot below 0 or past the pool, once a place.

    Raises:
      ValueError: a state without owner tags.

    Law 3.
    """
    must_be_state(state)
    _needs_tags(state, "hand_over")
    places = as_int32("slots", slots, 1)
    new, old = as_ids("to", to, slots=places), as_owner(state, by, slots=places)
    assert old is not None
    return _hand_over(state, places, new, old)


@jax.jit
def _hand_over(
    state: AllocatorState, slots: jax.Array, to: jax.Array, by: jax.Array
) -> AllocatorState:
    state, slots = keep_own(state, slots, by, one_owner=True)
    named = name_pages(state, not_alone(slots))
    holders, tags = holders_here(state, named), _needs_tags(state, "hand_over")
    held = holders > 0
    faults = fault_counts(double_free=named.first & ~held, out_of_range=named.out_of_range)
    pages = jnp.where(held, named.pages, jnp.int32(nowhere(state.full)))
    counted = replace(state, faults=add_faults(state.faults, faults), scratch=named.scratch)
    to, heir = not_alone(to), look_up(tags.heir, pages, NO_ONE_NAMED)
    left = (holders > 1) & (heir == TREE_OWNER)  # the last share stays the tree's
    return tag_pages(counted, pages, to, jnp.where(left, heir, to))


def _needs_tags(state: AllocatorState, call: str) -> OwnerTags:
    if state.owner_tags is None:
        raise ValueError(
            f"{call} needs pages that carry owner tags: make the state with "
            "PoolConfig(..., owner_tags=True)"
        )
    return state.owner_tags
