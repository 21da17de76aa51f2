"""What leaves a window, beside what the next token sees, worked out on the host row by row."""

from collections.abc import Iterator

import numpy as np

from swa_jax.config import PoolConfig
from swa_jax.debug.culprits import Broken, Pages
from swa_jax.debug.play import Step

WINDOW_KEPT = "window_kept"
WINDOW_TEXT = "Rule R8: what the next token sees keeps its SWA side, and whole pages leave"


def left_windows(step: Step) -> Iterator[Broken]:
    """Rows of `free_out_of_window` that gave back too much or too little, or a part of a page.

    Args:
      step: any call.
    """
    if step.call.name != "free_out_of_window":
        return
    config, arguments = step.before.config, step.arguments
    lens, stride = arguments["seq_lens"].tolist(), arguments.get("stride", 1)
    answer = np.asarray(step.answer).tolist()
    pages, texts = set[int](), []
    for row, _, right, _ in row_moves(step):
        new = answer[row]
        if new != right:
            slots = arguments["req_to_token"][row, max(min(new, right), 0) // stride :]
            slots = slots[: -(-abs(new - right) // stride)]
            pages |= set((slots // config.page_size).tolist()) - {0}
            texts.append(f"row {row} of {lens[row]} tokens gave back {new}, and {right} may go")
    if texts:
        yield Broken(WINDOW_KEPT, Pages(sorted(pages), []), "; ".join(texts[:4]))


def row_moves(step: Step) -> Iterator[tuple[int, int, int, str | None]]:
    """How far each row of `free_out_of_window` goes.

    Args:
      step: such a call.

    Yields:
      for each active row: its number, tokens that were given back before the call, tokens after
      it, and the misuse that refuses it, None where it takes part.
    """
    config, arguments = step.before.config, step.arguments
    lens, old = arguments["seq_lens"].tolist(), arguments["evicted_lens"].tolist()
    rows, columns = arguments["req_to_token"].shape
    insert, active = arguments.get("insert_lens"), arguments.get("active")
    size, width = config.page_size, columns * arguments.get("stride", 1)
    most = arguments.get("max_pages") or max(width // size, 1)
    for row in range(rows):
        if active is not None and not active[row]:
            continue
        start = old[row]
        edge = _frontier(config, lens[row], None if insert is None else int(insert[row]))
        if start < 0:
            yield row, start, start, "bad_length"
        elif start % size:
            yield row, start, start, "misaligned"
        elif edge > width and edge > start:
            yield row, start, start, "bad_length"
        else:
            yield row, start, min(max(edge, start), start + most * size), None


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
