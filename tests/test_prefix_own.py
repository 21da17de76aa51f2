"""A running request and the tree: what it stands on stays the tree's."""

import jax.numpy as jnp
import pytest

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.prefix_cache.own import give_to_tree

P = 4


@pytest.mark.parametrize("is_bigram", [False, True])
def test_a_request_that_has_computed_nothing_yet_gives_nothing_away(is_bigram):
    # Keys of pairs reach one token less far: the last page that the request was admitted on is no
    # whole page of pairs of what it holds, and yet not its own.
    pool = swa.PoolConfig(64, 64, P, 6)
    state, cache = swa.init(pool), prefix_cache.init(pool, is_bigram=is_bigram)
    tokens = jnp.arange(12, dtype=jnp.int32)
    state, grant = swa.alloc_extend(state, [0], [12], [-1], capacity=12)
    cache, state, inserted = prefix_cache.insert(cache, state, tokens, 12, grant.slots)
    mine = jnp.where(jnp.arange(12) >= inserted.length, grant.slots, 0)
    state = swa.free(state, mine)

    cache, match = prefix_cache.match_prefix(cache, state, tokens, 9)
    assert int(match.length) == 8
    cache, receipt = prefix_cache.lock(cache, state, match.node)
    cache, state, holding = give_to_tree(
        cache, state, tokens, match.length, match.slots[::P], receipt
    )
    assert int(holding.owned_from) == 8
    assert int(holding.receipt.node) == int(match.node)
    own = jnp.where(jnp.arange(3) * P >= holding.owned_from, holding.table, 0)
    state = swa.free(state, own)
    cache = prefix_cache.unlock(cache, holding.receipt)
    prefix_cache.check(cache, state)
    assert int(prefix_cache.full_protected_size(cache)) == 0
