"""Draft models and draft heads: the text never depends on them, and what they know is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import Ledger
from served_models import DenseGreedy, params_of, tiny
from serving_checks import assert_only_the_cache_holds, figures

import swa_jax as swa
from swa_jax.models import forward, random_params
from swa_jax.models.decoder.attention import dense_attention, sequence_mask
from swa_jax.models.decoder.layer import embed, norm, run_layer
from swa_jax.models.decoder.rope import rope_angles
from swa_jax.serving import ServingConfig, make_requests, new_world, outputs, run_steps, submit
from swa_jax.serving.draft_head import DraftHead, random_head_params
from swa_jax.serving.draft_levels import level_parents
from swa_jax.serving.draft_model import DraftModel
from swa_jax.serving.model import as_model
from swa_jax.serving.queue import open_requests
from swa_jax.serving.requests import Sampling
from swa_jax.serving.sample import sample
from swa_jax.serving.verify import DraftTree
from swa_jax.state import UNMAPPED

COUNT, LONGEST, NEW = 12, 28, 16
CONTEXT = LONGEST + NEW
LEDGER = Ledger(6)
TREE = (2, 2)


def config_of(model, draft, *, page, full, of_swa, cache, rollback):
    window = model.window - 1 if isinstance(model, Ledger) else model.past_window
    return ServingConfig(
        swa.PoolConfig(full, of_swa, page, window),
        CONTEXT,
        max_running=4,
        chunk_tokens=8,
        prefill_rows=2,
        max_new_tokens=NEW,
        prefix_cache=cache,
        draft=draft,
        rollback=rollback,
    )


class Doubting(Ledger):
    """Knows the next token, and takes it for the second likeliest: right drafts are moved."""

    def unembed(self, params, hidden):
        logits = super().unembed(params, hidden)
        return jnp.where(logits > 0, 3 - logits, 0)


# Pools of about two requests. The window of 5 past tokens is less than K drafts and a page of 4.
FOURS = {"page": 4, "full": 80, "of_swa": 48}
ONES = {"page": 1, "full": 64, "of_swa": 36}
LEDGERS = {
    "chain, page 4, cache": config_of(
        LEDGER, DraftModel(LEDGER, 3), **FOURS, cache=True, rollback="page"
    ),
    "chain, page 1, snapshot": config_of(
        LEDGER, DraftModel(LEDGER, 3), **ONES, cache=False, rollback="snapshot"
    ),
    "tree, page 1, cache, snapshot": config_of(
        LEDGER, DraftModel(Doubting(6), branches=TREE), **ONES, cache=True, rollback="snapshot"
    ),
    "tree, page 4": config_of(
        LEDGER, DraftModel(Doubting(6), branches=TREE), **FOURS, cache=False, rollback="page"
    ),
}


@functools.cache
def prompts():
    """Every second prompt begins like one before it, and goes another way after whole pages."""
    rng = np.random.default_rng(17)
    made = []
    for index in range(COUNT):
        prompt = rng.integers(0, 61, int(rng.integers(1, LONGEST + 1))).tolist()
        if index % 2:
            shared = made[int(rng.integers(index))]
            prompt = (shared[: len(shared) // 4 * 4] + prompt)[:LONGEST]
        made.append(prompt)
    return made


def wanted(**how):
    return make_requests(prompts(), max_new_tokens=NEW, prompt_columns=LONGEST, **how)


@functools.partial(jax.jit, static_argnums=(0, 1))
def start(model, config, requests):
    return submit(config, new_world(model, config, COUNT), requests)[0]


def run(model, params, config, requests, draft_params=None, watch=None):
    """Serves to the end, a step at a time; `watch` sees the world after each."""
    world = start(as_model(model), config, requests)
    while bool(open_requests(world.queue)):
        world = run_steps(model, params, config, world, 1, draft_params=draft_params)
        if watch is not None:
            watch(jax.device_get(world))
    return world


def texts(config, world):
    tokens, lengths = outputs(config, world, jnp.arange(COUNT, dtype=jnp.int32))
    return [row[:length].tolist() for row, length in zip(np.asarray(tokens), lengths, strict=True)]


def assert_clean(world):
    """Nothing is held but the cache, no law is broken, nothing was refused."""
    assert_only_the_cache_holds(world.allocator, world.cache)
    assert figures(world)["refused"] == 0


def acceptance(config, world):
    """Accepted drafts of those that could have been: one a level."""
    seen, depth = figures(world), int(DraftTree.of(config.draft.parents).depths.max())
    assert seen["drafted"] > 0
    return seen["accepted"] / (seen["drafted"] / config.num_drafts * depth)


def row_slots(world, row, size):
    """Full slots of the tokens that a row holds."""
    place = np.arange(world.rows.length[row])
    return world.rows.table[row][place // size] + place % size


def held_slots(config, world):
    """Full slots of all tokens that a row or the cache holds KV of."""
    size = config.pool.page_size
    held = [row_slots(world, row, size) for row in np.flatnonzero(world.rows.request >= 0)]
    if world.cache is not None:
        pages = np.flatnonzero(world.cache.in_tree)
        held.append((pages[:, None] * size + np.arange(size)).reshape(-1))
    return np.unique(np.concatenate([*held, np.zeros(0, np.int32)])).astype(np.int64)


def differing(config, world):
    """Tokens held whose KV is not the same in both Ledgers."""
    size, slots = config.pool.page_size, held_slots(config, world)
    page = world.allocator.full_to_swa[slots // size]
    live = page != UNMAPPED
    swa_slots = (page * size + slots % size)[live]
    both = zip(world.kv, world.draft, strict=True)
    full, of_swa = (its.reshape(-1) != mine.reshape(-1) for its, mine in both)
    return int(full[slots].sum() + of_swa[swa_slots].sum())


@functools.cache
def ledger_texts():
    return [LEDGER.continuation(prompt, NEW) for prompt in prompts()]


@pytest.mark.parametrize("name", LEDGERS)
def test_a_model_that_drafts_for_itself_is_believed_and_knows_what_it_knows(name):
    config, seen = LEDGERS[name], []
    world = run(
        LEDGER,
        None,
        config,
        wanted(),
        watch=lambda world: seen.append(differing(config, world)),
    )
    assert texts(config, world) == ledger_texts()
    assert_clean(world)
    assert acceptance(config, world) > 0.9
    assert not any(seen)
    stats = figures(world)
    assert stats["retracted"] > 0
    assert (stats["cached"] > 0) == (stats["evicted_full"] > 0) == config.prefix_cache


SAMPLED = {
    "temperature": [0.0, 0.4, 1.5] * (COUNT // 3),
    "top_k": [0, 0, 5, 2] * (COUNT // 4),
    "top_p": [1.0, 0.9] * (COUNT // 2),
    "seed": list(range(COUNT)),
}


@pytest.fixture(scope="module")
def sampled_texts():
    """Of a loop without speculation."""
    config = config_of(LEDGER, None, **ONES, cache=False, rollback="page")
    world = run(LEDGER, None, config, wanted(**SAMPLED))
    return texts(config, world)


@jax.jit
def drawn(token, place, sampling):
    logits = LEDGER.unembed(None, token.astype(jnp.float32)[None, None, None])
    return sample(logits, sampling, place[None, None])[0, 0]


def test_what_is_sampled_follows_from_seed_and_place(sampled_texts):
    settings = wanted(**SAMPLED).sampling
    for request, (prompt, text) in enumerate(zip(prompts(), sampled_texts, strict=True)):
        own = Sampling(*(values[request : request + 1] for values in vars(settings).values()))
        known = list(prompt)
        for token in text:
            likeliest = jnp.int32(LEDGER.next_token(known))
            assert token == int(drawn(likeliest, jnp.int32(len(known)), own))
            known.append(token)
    assert sampled_texts[0] == ledger_texts()[0]
    assert sampled_texts != ledger_texts()


@pytest.mark.parametrize("name", LEDGERS)
def test_samples_are_the_same_with_drafts(name, sampled_texts):
    config = LEDGERS[name]
    world = run(LEDGER, None, config, wanted(**SAMPLED))
    assert texts(config, world) == sampled_texts
    assert_clean(world)
    assert figures(world)["accepted"] > 0


class ForgetsToCatchUp(DraftModel):
    """Never computes a last draft that was accepted."""

    def observe(self, params, state, view, hidden, kept):
        return state


class ForgetsToMove(DraftModel):
    """Leaves its KV where the drafts were."""

    def move(self, state, old, new):
        return state


@pytest.mark.parametrize(
    ("draft", "size", "rollback"),
    [
        (ForgetsToCatchUp(LEDGER, 3), FOURS, "page"),
        (ForgetsToMove(Doubting(6), branches=TREE), ONES, "page"),
    ],
    ids=["catch up", "move"],
)
def test_a_draft_model_that_forgets_is_wrong_and_the_text_is_not(draft, size, rollback):
    config, seen = config_of(LEDGER, draft, **size, cache=False, rollback=rollback), []
    world = run(
        LEDGER, None, config, wanted(), watch=lambda world: seen.append(differing(config, world))
    )
    assert any(seen)
    assert acceptance(config, world) < 0.8
    assert texts(config, world) == ledger_texts()
    assert_clean(world)


class StuckLedger(Ledger):
    """Leaves the KV of accepted drafts where the drafts were."""

    def move_kv(self, kv, old, new):
        return kv


def test_a_model_that_does_not_move_its_own_kv_gives_another_text():
    model = StuckLedger(LEDGER.window)
    draft = DraftModel(Doubting(6), branches=TREE)
    config = config_of(model, draft, **ONES, cache=False, rollback="page")
    assert texts(config, run(model, None, config, wanted())) != ledger_texts()


# Attention that is real, and logits that are not those of the token itself.
MODEL = tiny(6, layer_kinds="SF", tie_embeddings=False)


@functools.cache
def dense_texts(seed=0):
    params = params_of(MODEL, seed)
    dense = DenseGreedy(MODEL, params, CONTEXT)
    return [dense(prompt, NEW) for prompt in prompts()]


def test_a_draft_model_over_real_attention():
    config = config_of(
        MODEL, DraftModel(MODEL, branches=TREE), **ONES, cache=False, rollback="page"
    )
    params = params_of(MODEL)
    world = run(MODEL, params, config, wanted(), params)
    assert texts(config, world) == dense_texts()
    assert_clean(world)
    assert acceptance(config, world) > 0.9
    # Another model is mostly wrong, and the text is the same.
    world = run(MODEL, params, config, wanted(), params_of(MODEL, 1))
    assert texts(config, world) == dense_texts()
    assert_clean(world)
    assert acceptance(config, world) < 0.5


def head_of(params, seed=5):
    return {"head": random_head_params(MODEL, jax.random.key(seed)), "model": params}


@jax.jit
def dense_head(params, tokens):
    """K, V and g of all tokens of one text but the last, without pages."""
    model, head = params["model"], params["head"]
    plain = {**model, "unembed": jnp.eye(MODEL.hidden_size)}
    hidden = forward(MODEL, plain, tokens[None])[:, :-1]
    text = norm(MODEL, head["embed_norm"], embed(MODEL, model, tokens[None, 1:]))
    both = jnp.concatenate([norm(MODEL, head["hidden_norm"], hidden), text], axis=-1)

    def mix(q, k, v):
        mask = sequence_mask(tokens.shape[0] - 1, None)
        scale = MODEL.attention_scale
        return dense_attention(q, k, v, mask, scale=scale, cap=None, sinks=None), (k, v)

    place = jnp.arange(tokens.shape[0] - 1, dtype=jnp.int32)[None]
    angles = rope_angles(MODEL.full_rope, place, MODEL.head_dim)
    made, (k, v) = run_layer(MODEL, head["layer"], both @ head["project"], angles, mix)
    return k[0], v[0], norm(MODEL, head["final_norm"], made)[0]


class HeadWatch:
    """Compares the head's KV and what it goes on from with a dense pass, for every row."""

    def __init__(self, config, params):
        self.size, self.params, self.known_ends = config.pool.page_size, params, 0

    def __call__(self, world):
        kv = world.draft.kv.reshape(-1, *world.draft.kv.shape[2:])
        for row in np.flatnonzero(world.rows.request >= 0):
            length = int(world.rows.length[row])
            if length == 0:
                continue
            tokens = jnp.asarray(world.queue.tokens[world.rows.request[row]])
            k, v, made = dense_head(self.params, tokens)
            slots = row_slots(world, row, self.size)
            np.testing.assert_allclose(kv[slots, 0::2], k[:length], atol=1e-4)
            np.testing.assert_allclose(kv[slots, 1::2], v[:length], atol=1e-4)
            ends = (world.draft.slot == slots[-1]) & (world.draft.length == length)
            for text in np.flatnonzero(ends & (world.draft.following == int(tokens[length]))):
                np.testing.assert_allclose(world.draft.hidden[text], made[length - 1], atol=1e-4)
                self.known_ends += 1


HEADS = {
    "chain, page 4, cache": config_of(
        MODEL, DraftHead(MODEL, 3), **FOURS, cache=True, rollback="page"
    ),
    "tree, page 1, snapshot": config_of(
        MODEL, DraftHead(MODEL, branches=TREE), **ONES, cache=False, rollback="snapshot"
    ),
}


def predictable(seed=0):
    """Parameters with which the next token follows from the last one alone, and a head for them."""
    params, head = params_of(MODEL, seed), random_head_params(MODEL, jax.random.key(seed))

    def silent(layer):
        return {**layer, "o": layer["o"] * 0, "down": layer["down"] * 0}

    model = {**params, "layers": tuple(silent(layer) for layer in params["layers"])}
    size = MODEL.hidden_size
    project = jnp.concatenate([jnp.zeros((size, size)), jnp.eye(size)])
    head = {**head, "project": project, "layer": silent(head["layer"])}
    return model, {"head": {**head, "final_norm": params["final_norm"]}, "model": model}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_reads_what_the_model_made_of_the_text(name):
    config, params = HEADS[name], params_of(MODEL)
    watch = HeadWatch(config, head_of(params))
    world = run(MODEL, params, config, wanted(), head_of(params), watch)
    # A random head is mostly wrong, and the text is the same.
    assert texts(config, world) == dense_texts()
    assert_clean(world)
    assert acceptance(config, world) < 0.5
    assert watch.known_ends > COUNT
    assert figures(world)["retracted"] > 0


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_right_is_believed(name):
    config = HEADS[name]
    params, draft_params = predictable()
    world = run(MODEL, params, config, wanted(), draft_params)
    dense = DenseGreedy(MODEL, params, CONTEXT)
    assert texts(config, world) == [dense(prompt, NEW) for prompt in prompts()]
    assert_clean(world)
    assert acceptance(config, world) > 0.9


def test_levels_of_a_tree():
    assert level_parents((1, 1, 1)) == (-1, 0, 1)
    assert level_parents((2, 2)) == (-1, -1, 0, 0, 1, 1)
    assert level_parents((3, 1)) == (-1, -1, -1, 0, 1, 2)
    assert DraftModel(LEDGER, branches=(2, 3)).num_drafts == 8
    assert DraftTree.of(DraftModel(LEDGER, 3).parents).is_chain


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "num_drafts must be an integer from 1"),
        ({"num_drafts": -1}, "num_drafts must be an integer from 1"),
        ({"branches": (2, 0)}, "branches must be an integer from 1"),
        ({"branches": (2, 2), "num_drafts": 3}, "make 6 drafts"),
    ],
)
@pytest.mark.parametrize("source", [DraftModel, DraftHead])
def test_wrong_numbers_are_refused(source, wrong, why):
    with pytest.raises(ValueError, match=why):
        source(MODEL, **wrong)


def test_a_draft_model_must_not_look_further_back_than_the_pools_keep():
    pool = swa.PoolConfig(64, 36, 1, sliding_window=5)
    with pytest.raises(ValueError, match="sliding_window=9"):
        DraftModel(tiny(10), 3).init(pool, 4)
    assert DraftModel(tiny(4), 3).init(pool, 4).full


def test_parameters_of_a_head_fit_the_family():
    model = tiny(6, family="gpt_oss")
    head = random_head_params(model, jax.random.key(0), jnp.bfloat16)
    assert head["project"].shape == (2 * model.hidden_size, model.hidden_size)
    assert {leaf.dtype for leaf in jax.tree.leaves(head)} == {jnp.dtype(jnp.bfloat16)}
    layer = random_params(model, jax.random.key(0))["layers"][0]
    assert jax.tree.map(jnp.shape, head["layer"]) == jax.tree.map(jnp.shape, layer)
