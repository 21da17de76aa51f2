"""A running request and the tree: what it stands on stays the tree's."""

import dataclasses

import jax.numpy as jnp
import pytest

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.prefix_cache.own import give_to_tree, receipt_of, with_receipt
from swa_jax.prefix_cache.receipts import Receipt

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


@dataclasses.dataclass(frozen=True)
class Rows:
    receipts: Receipt  # [3]


@pytest.mark.parametrize("row", range(4))
def test_the_receipt_of_a_row_past_the_end_is_nobodys(row):
    names = [field.name for field in dataclasses.fields(Receipt)]
    before = {name: [10 * n, 10 * n + 1, 10 * n + 2] for n, name in enumerate(names)}
    rows = Rows(Receipt(**{name: jnp.asarray(values) for name, values in before.items()}))
    new = Receipt(*(jnp.int32(number) for number in (7, 8, 9, 6)))
    after = with_receipt(rows, jnp.int32(row), new)
    for n, name in enumerate(names):
        right = [(7, 8, 9, 6)[n] if each == row else before[name][each] for each in range(3)]
        assert getattr(after.receipts, name).tolist() == right
    assert int(receipt_of(after, jnp.int32(2)).node) == (7 if row == 2 else 2)
