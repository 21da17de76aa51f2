"""Serving loops. The model's KV is the text and its logits are whole numbers: no bit is in doubt.

With a temperature floats choose the token. Their last bits are the backend's own, so that such a
program has its bits by luck wherever two tokens are that close: it is not marked exact.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax.serving import (
    DraftModel,
    NGramDraft,
    ServingConfig,
    World,
    cancel,
    make_requests,
    new_world,
    step,
    submit,
)
from tests.ledger_model import Ledger

from .numbers import below, words
from .program import Program

WINDOW, PLACES, LONGEST, NEW, STEPS, EVERY = 6, 12, 28, 12, 96, 12
MODEL = Ledger(WINDOW)
POOL = swa.PoolConfig(72, 24, 4, WINDOW - 1)
CONFIG = ServingConfig(POOL, 40, max_running=3, chunk_tokens=8, prefill_rows=2, max_new_tokens=NEW)


def prompts(seed: int, count: int = PLACES, longest: int = LONGEST) -> list[list[int]]:
    """Of few words, and every second one begins like the one before it."""
    lens, texts = below(longest, seed, count) + 1, below(5, seed + 1, count, longest)
    rows = [text[:length].tolist() for text, length in zip(texts, lens, strict=True)]
    for at in range(1, count, 2):
        rows[at] = (rows[at - 1] + rows[at])[:longest]
    return rows


def _program(name: str, seed: int, *, exact: bool = True, **changes: Any) -> Program:
    config = ServingConfig(**{**vars(CONFIG), **changes})

    def start(rank: int) -> World:
        at = seed + 20 * rank
        requests = make_requests(
            prompts(at),
            prompt_columns=40,
            max_new_tokens=(below(NEW, at + 2, PLACES) + 1).tolist(),
            temperature=0.0 if exact else 0.8,
            top_k=0 if exact else below(9, at + 3, PLACES).tolist(),
            top_p=1.0 if exact else 0.9,
            seed=(words(at + 4, PLACES) - 2**30).tolist(),
            namespace=below(2, at + 5, PLACES).tolist(),
        )
        return submit(config, new_world(MODEL, config, PLACES), requests)[0]

    def inputs(rank: int) -> dict[str, np.ndarray]:
        """Somebody gives up now and then: a place, or -1."""
        drawn = below(16 * PLACES, seed + 20 * rank + 6, STEPS)
        return {"cancelled": np.where(drawn < PLACES, drawn, -1).astype(np.int32)}

    def one_step(world: World, given: dict[str, jax.Array]) -> tuple[World, jax.Array]:
        world = cancel(world, given["cancelled"][None])
        world = step(MODEL, config, None, None, world)
        return world, jnp.stack([world.stats.generated, world.stats.refused])

    return Program(f"serving, {name}", start, inputs, one_step, EVERY, exact=exact)


_NGRAM = NGramDraft(3, 1)
PROGRAMS = [
    _program("cache", 30_000),
    _program("drafts", 31_000, draft=_NGRAM),
    _program("drafts, snapshot", 32_000, draft=_NGRAM, rollback="snapshot"),
    _program("draft model", 33_000, draft=DraftModel(MODEL, 2)),
    _program("sampled", 34_000, exact=False),
    _program("sampled, drafts", 35_000, exact=False, draft=_NGRAM),
]
