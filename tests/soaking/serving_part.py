"""Parts that run the serving loop, each with a configuration of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax.serving import DraftModel, NGramDraft, ServingConfig
from tests.ledger_model import Ledger

from .asking import KINDS, TENANTS, Shape
from .loops import SAMPLES, Load, Static, law_names, new_load, run_block
from .one_buffer import OneBufferLedger
from .part import Left
from .planted import Plant, no_plant
from .take_apart import take_apart
from .traces import load_traces
from .watch import raise_if_broken
from .weather import Block

WINDOW, VOCAB, NEW, PLACES = 6, 19, 12, 8
MODEL = Ledger(WINDOW, vocab_size=VOCAB, eos_token_ids=(7,))
IN_ONE_BUFFER = OneBufferLedger(WINDOW, vocab_size=VOCAB, eos_token_ids=(7,))
_DRAFT = NGramDraft(3, 1)
_UNIFIED_UNITS = 2 + 11 * 2  # for padding pages, and blocks of two full pages or an SWA page
# Pages, chunks, drafts and what they leave behind; pools for little more than the longest request.
_TIGHT = ServingConfig(
    swa.PoolConfig(64, 28, 4, WINDOW - 1),
    68,
    max_running=4,
    chunk_tokens=8,
    prefill_rows=2,
    max_new_tokens=NEW,
    draft=_DRAFT,
    rollback="snapshot",
)
CONFIGS = {
    "tight": _TIGHT,
    "tokens": ServingConfig(
        swa.PoolConfig(44, 26, 1, WINDOW - 1),
        48,
        max_running=3,
        chunk_tokens=5,
        prefill_rows=1,
        max_new_tokens=NEW,
        policy="lfu",
    ),
    "roomy": ServingConfig(
        swa.PoolConfig(384, 128, 4, WINDOW - 1),
        96,
        max_running=5,
        chunk_tokens=16,
        prefill_rows=2,
        max_new_tokens=NEW,
        draft=_DRAFT,
    ),
    # Both pools out of one budget, for little more than the longest request.
    "unified": replace(_TIGHT, pool=swa.PoolConfig.unified(_UNIFIED_UNITS * 32, IN_ONE_BUFFER, 4)),
    # Sampled texts, drafted as trees by a model; pages that say whose they are.
    "sampled": ServingConfig(
        swa.PoolConfig(64, 40, 4, WINDOW - 1, owner_tags=True),
        68,
        max_running=3,
        chunk_tokens=8,
        prefill_rows=1,
        max_new_tokens=NEW,
        draft=DraftModel(MODEL, branches=(2, 1)),
    ),
}
STATS = (
    "generated",
    "prefilled",
    "retracted",
    "drafted",
    "accepted",
    "evicted_full",
    "evicted_swa",
)
# Of every one of these loops, whichever else is run.
_OF_EACH = (
    *STATS,
    "drafts_refused",
    "stop",
    "length",
    "rejected",
    "chunked",
    "cache_hits",
    "session_hits",
    "cancelled_waiting",
    "cancelled_running",
    "fences",
    "pages_freed_in_groups",
    "steps_at_99.9_percent",
    "steps_with_a_refusal",
    "texts_compared_on_the_host",
)
NEEDS = (*KINDS, *(f"tenant_{tenant}" for tenant in range(TENANTS)), *_OF_EACH)
# These see to themselves; the others see to each other's kinds of load.
ALONE = {
    "unified": (*NEEDS, "blocks_to_full", "blocks_to_swa"),  # alone where time is short
    "sampled": (*_OF_EACH, "drawn", "texts_not_the_likeliest"),
}


class ServingPart:
    """The loop, with mixed load."""

    def __init__(self, config: str, seed: int, plant: Plant | None = None) -> None:
        """Nothing has come yet."""
        self.name = f"loops, {config}"
        self.group = self.name if config in ALONE else "loops"
        self.needs = ALONE.get(config, NEEDS)
        sizes = CONFIGS[config]
        block = 1 if sizes.pool.page_size == 1 else 2
        model = MODEL if sizes.pool.unified_layout is None else IN_ONE_BUFFER
        shape = Shape.of(sizes, VOCAB, block)
        self._static = Static(model, sizes, shape, draws=config == "sampled")
        self._load: Load = new_load(self._static, PLACES, seed)
        self._traces = load_traces()
        self._plant = no_plant() if plant is None else plant
        self._names = law_names(self._static, self._load)

    def run(self, goal: int, quota: int, block: Block) -> Counter[str]:
        """See `Part.run`."""
        before = self._figures()
        self._load = run_block(
            self._static,
            self._load,
            self._traces,
            block.weather,
            jnp.int32(goal),
            jnp.int32(quota),
            self._plant,
        )
        load = self._load
        raise_if_broken(self.name, self._names, load.watch)
        found = self._figures() - before
        found.update({name: int(count) for name, count in load.counts.items()})
        found["looks"] = int(load.watch.looks)
        found["drafts_refused"] = found["drafted"] - found["accepted"]
        found += self._compare()
        return found

    def _figures(self) -> Counter[str]:
        watch, stats = jax.device_get((self._load.watch, self._load.world.stats))
        found = Counter({name: int(getattr(stats, name)) for name in STATS})
        found["steps"] = int(watch.steps)
        return found

    def _compare(self) -> Counter[str]:
        """Texts that the model, in plain Python, would have written likewise.

        Of texts that are drawn the device alone says which token is right; here they are words.
        """
        seen = jax.device_get(self._load.samples)
        found = Counter[str]()
        for at in range(min(int(seen.so_far), SAMPLES)):
            text = seen.tokens[at, : seen.known[at]].tolist()
            prompt, made = text[: seen.prompt_lens[at]], text[seen.prompt_lens[at] :]
            model = Ledger(WINDOW, vocab_size=VOCAB) if seen.ignore_eos[at] else MODEL
            right = model.continuation(prompt, len(made))
            wrong = f"{self.name}: {prompt} was continued by {made}, not by {right}"
            assert made == right or seen.drawn[at], wrong
            assert all(0 <= token < VOCAB for token in made), wrong
            found["texts_not_the_likeliest" if made != right else "texts_compared_on_the_host"] += 1
        fresh = seen._replace(so_far=np.int32(0))
        self._load = self._load._replace(samples=jax.tree.map(jnp.asarray, fresh))
        return found

    def close(self) -> Left:
        """See `Part.close`."""
        return take_apart(self._load.world)
