"""A prefix cache in words: what its `repr` says and the table that a notebook shows.

The tree alone cannot tell a tombstone: whether a page has its SWA side is in the allocator's state
(`swa_jax.viz.prefix_tree` looks at both).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from swa_jax.html_table import html_table
from swa_jax.state_summary import UnreadableError, on_host
from swa_jax.state_text import span, title_of

_FIELDS = (
    "in_tree",
    "depth",
    "namespace",
    "children",
    "full_locks",
    "swa_locks",
    "num_receipts",
    "clock",
)


@dataclass(frozen=True)
class TreeSummary:
    """A tree, or a batch of them, in figures on the host: int64 of the batch's shape each."""

    nodes: np.ndarray  # pages
    ends: np.ndarray  # pages that nothing hangs from
    deepest: np.ndarray  # pages
    namespaces: np.ndarray
    full_locked: np.ndarray  # pages
    swa_locked: np.ndarray  # pages
    receipts: np.ndarray  # outstanding
    clock: np.ndarray


def summarize_tree(cache: Any) -> TreeSummary:  # noqa: ANN401 - a PrefixCache, which imports this
    """Counts the nodes of a tree. Waits for the device.

    Raises:
      UnreadableError: it has no values here.
    """
    arrays = on_host({name: getattr(cache, name) for name in _FIELDS})
    here = arrays["in_tree"].astype(bool)

    def count(marks: np.ndarray) -> np.ndarray:
        return np.count_nonzero(here & marks, axis=-1) + np.zeros(here.shape[:-1], np.int64)

    rows = here.reshape(-1, here.shape[-1])
    spaces = arrays["namespace"].reshape(rows.shape)
    kinds = [np.unique(space[row]).size for row, space in zip(rows, spaces, strict=True)]
    return TreeSummary(
        nodes=count(here),
        ends=count(arrays["children"] == 0),
        deepest=np.max(np.where(here, arrays["depth"], 0), axis=-1),
        namespaces=np.array(kinds, np.int64).reshape(here.shape[:-1]),
        full_locked=count(arrays["full_locks"] > 0),
        swa_locked=count(arrays["swa_locks"] > 0),
        receipts=arrays["num_receipts"],
        clock=arrays["clock"],
    )


def tree_as_text(cache: Any) -> str:  # noqa: ANN401
    """A tree in a few lines, whatever it is made of."""
    try:
        summary = summarize_tree(cache)
        title = _title(cache)
    except UnreadableError as error:
        return f"PrefixCache({error})"
    except Exception as error:  # a repr must not fail: it is read while other errors are sought
        return f"PrefixCache(it cannot be read: {type(error).__name__})"
    sizes = "".join(f"[{size}]" for size in summary.nodes.shape)
    lines = [f"  {label:<6}  {text}" for label, text in _facts(cache, summary)]
    return "\n".join([f"PrefixCache{sizes}: {title}", *lines])


def tree_as_html(cache: Any) -> str | None:  # noqa: ANN401
    """A table for a notebook; None, which shows the `repr`, where there are no values."""
    try:
        facts = _facts(cache, summarize_tree(cache))
        return html_table(f"PrefixCache: {_title(cache)}", ["", ""], facts)
    except Exception:  # whatever it is, the repr says it
        return None


def _title(cache: Any) -> str:  # noqa: ANN401
    config = cache.config
    pairs = ", by pairs of tokens" if config.is_bigram else ""
    return f"{config.policy} over {title_of(config.pool)}{pairs}"


def _facts(cache: Any, summary: TreeSummary) -> list[tuple[str, str]]:  # noqa: ANN401
    pages, s = cache.config.pool.full_pages, summary
    spaces = f" in {span(s.namespaces)} namespaces" if (s.namespaces > 1).any() else ""
    cached = f"{span(s.nodes)} of {pages:,} full pages, {span(s.ends)} ends, at most "
    return [
        ("cached", f"{cached}{span(s.deepest)} pages deep{spaces}"),
        ("locked", f"{span(s.full_locked)} pages, {span(s.swa_locked)} with their SWA side"),
        ("locks", f"{span(s.receipts)} receipts outstanding"),
        ("clock", span(s.clock)),
    ]
