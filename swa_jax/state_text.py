"""A state in words: what its `repr` says and the table that a notebook shows."""

from typing import Any

import numpy as np

from swa_jax.config import PoolConfig
from swa_jax.html_table import Bar, html_table
from swa_jax.state_summary import (
    PoolCounts,
    StateSummary,
    UnreadableError,
    on_host,
    summarize,
)

_MOST_ROWS = 8  # states of a batch that a notebook's table lists one by one


def title_of(config: PoolConfig) -> str:
    """Sizes and window in one line."""
    page, layout = f"of {how_many(config.page_size, 'token')}", config.unified_layout
    if layout is not None:
        swa_pages = how_many(layout.swa_pages, "SWA page")
        block = f"a block {layout.full_pages:,} full or {swa_pages} {page}"
        sizes = f"one budget of {how_many(layout.blocks, 'block')}, {block}"
    elif config.pure_swa_pool:
        sizes = f"one pool of {how_many(config.swa_pages, 'SWA page')} {page}"
    elif config.has_rings:
        rings = f"{how_many(config.swa_units, 'SWA ring')} of {config.swa_unit_tokens:,} tokens"
        sizes = f"{how_many(config.full_pages, 'full page')} {page}, {rings}"
    else:
        sizes = f"{config.full_pages:,} full and {how_many(config.swa_pages, 'SWA page')} {page}"
    return f"{sizes}, {window_of(config)}"


def how_many(count: int, what: str) -> str:
    """The number and the noun, in the plural unless there is one."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def window_of(config: PoolConfig) -> str:
    """The window in words."""
    if config.sliding_window is None:
        return "no window"
    kind = "chunks of" if config.chunked else "window"
    return f"{kind} {config.sliding_window:,}"


def as_text(state: Any) -> str:  # noqa: ANN401 - an AllocatorState
    """A state in a few lines, whatever it is made of."""
    head = "AllocatorState"
    try:
        summary = summarize(state)
    except UnreadableError as error:
        return f"{head}({_title(state)}; {error})"
    except Exception as error:  # a repr must not fail: it is read while other errors are sought
        return f"{head}({_title(state)}; it cannot be read: {type(error).__name__})"
    sizes = "".join(f"[{size}]" for size in summary.batch)
    parts = [(pool.name, pool_text(pool)) for pool in summary.pools] + facts(summary)
    width = max(len(name) for name, _ in parts)
    lines = [f"  {name:<{width}}  {text}" for name, text in parts]
    each = ", each" if summary.batch else ""
    return "\n".join([f"{head}{sizes}: {title_of(summary.config)}{each}", *lines])


def pool_as_text(pool: Any) -> str:  # noqa: ANN401 - a PagePool
    """One pool alone in a line."""
    try:
        arrays = on_host(
            {"holders": pool.holders, "free": pool.num_free, "pending": pool.num_pending}
        )
        held = np.count_nonzero(arrays["holders"][..., 1:], axis=-1)
        size, has_ring = pool.holders.shape[-1] - 1, pool.ring.shape[-1] > 1
    except UnreadableError as error:
        return f"PagePool({error})"
    except Exception as error:  # as above
        return f"PagePool(it cannot be read: {type(error).__name__})"
    batch = "".join(f"[{length}]" for length in np.shape(held))
    rest = f", {span(arrays['pending'])} pending, {span(arrays['free'])} free"
    # A pure SWA state's full side remembers holders and grants nothing.
    rest = rest if has_ring or size == 1 else ""
    return f"PagePool{batch}({how_many(size, 'page')}: {span(np.asarray(held))} held{rest})"


def _title(state: Any) -> str:  # noqa: ANN401
    config = getattr(state, "config", None)
    return title_of(config) if isinstance(config, PoolConfig) else "of no configuration"


def pool_text(pool: PoolCounts) -> str:
    """The counts of a pool in one line."""
    text = f"{span(pool.held)} held, {span(pool.pending)} pending, {span(pool.free)} free"
    for name, values in (("shared", pool.shared), ("in the other pool", pool.absent)):
        if values.any():
            text += f"; {span(values)} {name}"
    if pool.lost.any():
        text += f"; {span(pool.lost)} unaccounted for, see swa.check"
    return text


def facts(summary: StateSummary) -> list[tuple[str, str]]:
    """What there is to say beside the pools, as (label, text)."""
    found = []
    if summary.mapped is not None:
        held = summary.pools[0].held
        share = f" ({_percent(int(summary.mapped), int(held))})" if summary.mapped.ndim == 0 else ""
        found.append(("mapped", f"{span(summary.mapped)} of {span(held)} held full pages{share}"))
    if summary.left is not None and summary.left.any():
        text = f"behind a window and not given back by their holders: {span(summary.left)}"
        found.append(("left", text))
    if summary.group_open.any():
        of_batch = ""
        if summary.batch:
            count, all_states = int(summary.group_open.sum()), summary.group_open.size
            of_batch = f" in {count:,} of {all_states:,} states"
        found.append(("group", f"open{of_batch}"))
    counts = summary.fault_counts()
    text = ", ".join(f"{kind} {count:,}" for kind, count in counts.items()) or "none"
    return [*found, ("faults", text)]


def span(values: np.ndarray) -> str:
    """One number, or the least and the most of several."""
    if not values.size:
        return "no"
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "none held"


def as_html(state: Any) -> str | None:  # noqa: ANN401
    """A table for a notebook; None, which shows the `repr`, where there are no values."""
    try:
        summary = summarize(state)
    except Exception:  # whatever it is, the repr says it
        return None
    title = f"AllocatorState: {title_of(summary.config)}"
    if summary.batch:
        title += f"; a batch of {' x '.join(f'{size:,}' for size in summary.batch)}"
    header = ["state"] * bool(summary.batch)
    header += ["pool", "size", "", "held", "pending", "free", "tokens free"]
    rows = [row for index in _first_states(summary) for row in _rows(summary, index)]
    notes = [f"{name}: {text}" for name, text in facts(summary)]
    hidden = int(np.prod(summary.batch, dtype=np.int64)) - _MOST_ROWS
    if hidden > 0:
        notes.insert(0, f"and {hidden:,} more states; of all of them:")
    return html_table(title, header, rows, notes)


def _first_states(summary: StateSummary) -> list[tuple[int, ...]]:
    return [index for _, index in zip(range(_MOST_ROWS), np.ndindex(summary.batch), strict=False)]


def _rows(summary: StateSummary, index: tuple[int, ...]) -> list[list[str | Bar]]:
    rows: list[list[str | Bar]] = []
    for pool in summary.pools:
        size, held, pending, free, shared, absent = (
            int(values[index])
            for values in (
                pool.size,
                pool.held,
                pool.pending,
                pool.free,
                pool.shared,
                pool.absent,
            )
        )
        bar = Bar((("held", held), ("pending", pending), ("free", free), ("elsewhere", absent)))
        also = f", {shared:,} shared" if shared else ""
        row: list[str | Bar] = [", ".join(map(str, index))] if summary.batch else []
        row += [pool.name, how_many(size, pool.unit), bar, f"{held:,}{also}", f"{pending:,}"]
        rows.append([*row, f"{free:,}", f"{free * pool.unit_tokens:,}"])
    return rows
