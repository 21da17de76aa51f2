"""What leaves a window, beside what the next token sees, worked out on the host row by row."""

from collections.abc import Iterator

import numpy as np

from swa_jax.config import PoolConfig
from swa_jax.debug.culprits import Broken, Pages
from swa_jax.debug.play import Step

WINDOW_KEPT = "window_kept"
WINDOW_TEXT = "Rule R8: what the next token sees keeps its SWA side, and whole pages leave"


def left_windows(step: Step) -> Iterator[Broken]:
    """Rows of `free_out_of_window` that gave back too much, or a part of a page.

    Args:
      step: any call.
    """
    if step.call.name != "free_out_of_window":
        return
    config, arguments = step.before.config, step.arguments
    lens, old = arguments["seq_lens"].tolist(), arguments["evicted_lens"].tolist()
    insert = arguments.get("insert_lens")
    kept = [None] * len(lens) if insert is None else insert.tolist()
    pages, texts = set[int](), []
    for row, new in enumerate(np.asarray(step.answer).tolist()):
        edge = max(old[row], _frontier(config, lens[row], kept[row]))
        if new > edge or (new != old[row] and new % config.page_size):
            stride = arguments.get("stride", 1)
            slots = arguments["req_to_token"][row, edge // stride : max(new, 0) // stride]
            pages |= set((slots // config.page_size).tolist()) - {0}
            texts.append(f"row {row} of {lens[row]} tokens gave back {new}, and {edge} may go")
    if texts:
        yield Broken(WINDOW_KEPT, Pages(sorted(pages), []), "; ".join(texts[:4]))


def _frontier(config: PoolConfig, tokens: int, insert: int | None) -> int:
    """Tokens below which SWA pages are dead."""
    edge = _dead_below(config, max(tokens, 0))
    if insert is not None:
        kept = max(insert, 0)
        edge = min(edge, _dead_below(config, max(kept - 1, 0) if config.chunked else kept))
    return edge // config.page_size * config.page_size


def _dead_below(config: PoolConfig, tokens: int) -> int:
    assert config.sliding_window is not None
    window = config.sliding_window
    return tokens // window * window if config.chunked else max(tokens - window, 0)
