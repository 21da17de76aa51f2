"""What must hold of a serving world after every step, beyond the laws of its parts.

Legend: R rows, C pages of a row, F full pages, S SWA pages, L most tokens of a request.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import swa_jax as swa
from swa_jax import disagg, prefix_cache
from swa_jax.counts import held_pages
from swa_jax.disagg.inbox import Inbox, own_pages
from swa_jax.only_if import only_if
from swa_jax.paging import page_of, pages_for
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.draft_model import DraftModel
from swa_jax.serving.queue import DONE, EMPTY, Queue
from swa_jax.serving.requests import LENGTH, STOP
from swa_jax.serving.sample import sample
from swa_jax.serving.world import World, of_rows, running
from swa_jax.state import UNMAPPED
from tests.ledger_model import Ledger


class RowPages(NamedTuple):
    """Who has which page."""

    pages: jax.Array  # int32[R, C]
    own: jax.Array  # bool[R, C] the row's own
    live: jax.Array  # bool[R, C] its own, with an SWA side
    shared: jax.Array  # bool[R, C] the tree's


def row_pages(config: ServingConfig, world: World) -> RowPages:
    """Pages by row, as the rows have them."""
    rows, size = world.rows, config.pool.page_size
    first = jnp.arange(config.table_pages, dtype=jnp.int32)[None, :] * jnp.int32(size)
    some = running(rows)[:, None] & (first < rows.length[:, None])
    own = some & (first >= rows.owned_from[:, None])
    return RowPages(
        pages=page_of(rows.table, size),
        own=own,
        live=own & (first >= rows.evicted[:, None]),
        shared=some & ~own,
    )


def world_laws(
    config: ServingConfig, world: World, inbox: Inbox | None = None
) -> dict[str, jax.Array]:
    """bool[] by name: the laws of allocator, cache and reservations, and those of who owns what."""
    state, cache = world.allocator, world.cache
    assert cache is not None
    rows = row_pages(config, world)
    laws = {f"allocator.{name}": holds for name, holds in swa.invariants(state).items()}
    tree = prefix_cache.invariants(cache, state)
    laws |= {f"prefix_cache.{name}": holds for name, holds in tree.items()}
    laws["no_faults"] = jnp.sum(state.faults, dtype=jnp.int32) == 0
    if state.owner_tags is not None:
        laws["nobody_names_what_is_foreign"] = state.owner_tags.foreign == 0
    laws["no_grant_refused"] = world.stats.refused == 0
    laws |= _owners(world, rows, inbox)
    laws["one_tenant"] = _one_tenant(world, rows)
    if isinstance(config.draft, DraftModel):
        laws["the_draft_has_the_text"] = _draft_has_the_text(config.draft, world, rows)
    if inbox is not None:
        own = (jnp.sum(part, dtype=jnp.int32) for part in (rows.own, rows.live))
        others = disagg.invariants(inbox, state, cache, others=(next(own), next(own)))
        laws |= {f"disagg.{name}": holds for name, holds in others.items()}
    return laws


def _owners(world: World, rows: RowPages, inbox: Inbox | None) -> dict[str, jax.Array]:
    """Each held page has as many owners as it has holders: rows, the tree, reservations."""
    state, cache = world.allocator, world.cache
    assert cache is not None
    nowhere = state.full.holders.shape[0]
    named = cache.in_tree.astype(jnp.int32)
    places = [jnp.where(rows.own, rows.pages, nowhere)]
    live = jnp.sum(rows.live, dtype=jnp.int32)
    if inbox is not None:
        own, of_swa = own_pages(inbox)
        places.append(jnp.where(own, page_of(inbox.table, inbox.pool.page_size), nowhere))
        live = live + jnp.sum(of_swa, dtype=jnp.int32)
    for place in places:
        named = named.at[place.reshape(-1)].add(1, mode="drop")
    in_tree = cache.in_tree & (state.full_to_swa != UNMAPPED)
    live = live + jnp.sum(in_tree, dtype=jnp.int32)
    mapped = state.full_to_swa.at[rows.pages].get(mode="clip") != UNMAPPED
    return {
        "every_page_has_its_owner": jnp.all(named[1:] == state.full.holders[1:]),
        "swa_pages_add_up": live == held_pages(state)[1],
        "windows_are_kept": jnp.all(~rows.own | (mapped == rows.live)),
    }


def _one_tenant(world: World, rows: RowPages) -> jax.Array:
    """bool[] what a row shares is in the tree, locked, and of its own namespace."""
    cache = world.cache
    assert cache is not None
    mine = of_rows(world.rows, world.queue.namespace)[:, None]
    good = cache.in_tree.at[rows.pages].get(mode="clip")
    good = good & (cache.full_locks.at[rows.pages].get(mode="clip") > 0)
    good = good & (cache.namespace.at[rows.pages].get(mode="clip") == mine)
    return jnp.all(~rows.shared | good)


def _draft_has_the_text(draft: DraftModel, world: World, rows: RowPages) -> jax.Array:
    """bool[] the KV of a `Ledger` that drafts is the text too, of every token that a row holds.

    A draft from a wrong page would only be refused: no text would show it.
    """
    state, size = world.allocator, world.allocator.config.page_size
    pools = draft.pools(world.draft)
    place = jnp.arange(rows.pages.shape[1] * size, dtype=jnp.int32)
    known = of_rows(world.rows, world.queue.tokens)
    text = known.at[:, place].get(mode="fill", fill_value=0).reshape(*rows.pages.shape, size)
    held = (place[None, :] < world.rows.length[:, None]).reshape(text.shape)
    held = held & running(world.rows)[:, None, None]
    sides = state.full_to_swa.at[rows.pages].get(mode="clip")
    has_side = (sides != UNMAPPED)[..., None]
    full = pools.full[0].at[rows.pages].get(mode="clip")
    of_swa = pools.swa[0].at[jnp.maximum(sides, 0)].get(mode="clip")
    return jnp.all(~held | ((full == text) & (~has_side | (of_swa == text))))


TEXT_LAWS = ("every_token_is_its_own", "nothing_after_an_end", "ends_are_right")


def text_laws_if(
    wanted: jax.Array,
    model: Ledger,
    queue: Queue,
    before: dict[str, jax.Array],
    *,
    draws: bool = False,
) -> dict[str, jax.Array]:
    """`text_laws` where bool[] `wanted`, else `before`: they cost as much as a step."""

    def look(both: tuple[Queue, dict[str, jax.Array]]) -> tuple[Queue, dict[str, jax.Array]]:
        return both[0], text_laws(model, both[0], draws=draws)

    return only_if(wanted, look, (queue, before))[1]


def text_laws(model: Ledger, queue: Queue, *, draws: bool = False) -> dict[str, jax.Array]:
    """bool[] by name: each token that was generated is the one that follows; ends are right.

    Args:
      model: static.
      queue: with the texts.
      draws: static, tokens are sampled: the one that follows is what the text before it, the seed
        and the place give when all places are drawn at once.
    """
    known, prompt = queue.known[:, None], queue.prompt_lens[:, None]
    place = jnp.arange(queue.tokens.shape[1], dtype=jnp.int32)[None, :]
    made = (place >= prompt) & (place < known) & (queue.status != EMPTY)[:, None]
    ends = jnp.zeros(queue.tokens.shape, bool)
    for token in model.eos_token_ids:
        ends = ends | (queue.tokens == token)
    ends = ends & made & ~queue.ignore_eos[:, None]
    last = jnp.any(ends & (place == known - 1), axis=1)
    done = queue.status == DONE
    stopped, full = done & (queue.reason == STOP), done & (queue.reason == LENGTH)
    right = _right(model, queue.tokens)
    if draws:
        logits = model.unembed(None, right.astype(jnp.float32)[..., None])
        right = sample(logits, queue.sampling, jnp.broadcast_to(place, right.shape))
    holds = (
        jnp.all(~made | (queue.tokens == right)),
        ~jnp.any(ends & (place < known - 1)),
        jnp.all(~stopped | last) & jnp.all(~full | (queue.known == queue.limit)),
    )
    return dict(zip(TEXT_LAWS, holds, strict=True))


def _right(model: Ledger, tokens: jax.Array) -> jax.Array:
    """int32[N, L] what follows the tokens before each place."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    total = jnp.zeros_like(tokens)
    for window, factor in ((tokens.shape[1], 3), (model.window, 5)):
        weight = jax.lax.rem(place * jnp.int32(factor), jnp.int32(11)) + 1
        value = (tokens + 1) * weight[None, :]
        before = jnp.pad(jnp.cumsum(value, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
        begin = jnp.maximum(place - window, 0)
        total = total + before[:, :-1] - before[:, begin]
    return jax.lax.rem(total, jnp.int32(model.vocab_size))


def chunks_of(config: ServingConfig, tokens: jax.Array) -> jax.Array:
    """int32 chunks that a prompt of so many tokens is prefilled in, without a cache."""
    return pages_for(tokens, config.chunk_tokens)
