"""The prefill side of two processes, and what both sides serve."""

import json
import os
import sys

import jax
import served_models

import swa_jax as swa
from swa_jax import disagg
from swa_jax.counts import held_pages
from swa_jax.disagg.bundles import BundleSize
from swa_jax.disagg.prefill_worker import PrefillWorker
from swa_jax.disagg.processes import serve_prefill
from swa_jax.serving import DraftHead, ServingConfig, random_head_params

KEY = "DISAGG_TEST_KEY"
MODEL = served_models.tiny(6, layer_kinds="SF", kv_heads=2)
LONGEST, NEW = 22, 6
SIZE = BundleSize(pieces=4, full_tokens=8, swa_tokens=8)
DECODE_POOL = swa.PoolConfig(128, 64, 4, MODEL.past_window)
DECODE = ServingConfig(
    DECODE_POOL,
    LONGEST + NEW,
    max_running=4,
    chunk_tokens=8,
    max_new_tokens=NEW,
    prefix_cache=False,
    draft=DraftHead(MODEL, 2),
)


def prefill_config():
    """Smaller pages, and a window that is wide enough for the other side's."""
    pool = swa.PoolConfig(96, 48, 2, MODEL.past_window)
    window = disagg.prefill_window(pool, DECODE_POOL, DECODE.key_lag, keeps_boundary=False)
    pool = swa.PoolConfig(96, 48, 2, window)
    return ServingConfig(**{**vars(DECODE), "pool": pool, "role": "prefill"})


def params():
    """The model's, and the head's."""
    own = served_models.params_of(MODEL)
    return own, {"head": random_head_params(MODEL, jax.random.key(5)), "model": own}


def main(port):
    """Serves one decode side after another."""
    own, drafts = params()
    worker = PrefillWorker(MODEL, prefill_config(), own, draft_params=drafts, places=8, size=SIZE)
    while True:
        serve_prefill(worker, ("127.0.0.1", port), os.environ[KEY].encode())
        swa.check(worker.world.allocator)
        held = [int(pages) for pages in held_pages(worker.world.allocator)]
        faults = sum(swa.faults(worker.world.allocator).values())
        print(json.dumps({"held": held, "faults": faults}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
