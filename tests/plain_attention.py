"""Attention as its definition says it, one query and one head at a time, and cases for it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from swa_jax.models.decoder.batch import PagedBatch


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention, in NumPy."""

    q: np.ndarray  # float32[R, Q, Hq, D]
    kv_layer: np.ndarray  # float32[pages + 1, P, 2 * Hkv, D]
    pages: np.ndarray  # int32[R, N]
    positions: np.ndarray  # int32[R, Q]
    q_lens: np.ndarray  # int32[R]
    kv_lens: np.ndarray  # int32[R]
    tree_mask: np.ndarray | None  # bool[R, Q, Q]

    @property
    def batch(self) -> PagedBatch:
        """The batch of this case; what attention does not look at is 0."""
        zeros = jnp.zeros(self.positions.shape, jnp.int32)
        return PagedBatch(
            tokens=zeros,
            positions=jnp.asarray(self.positions),
            q_lens=jnp.asarray(self.q_lens),
            kv_lens=jnp.asarray(self.kv_lens),
            full_slots=zeros,
            swa_slots=zeros,
            full_pages=jnp.asarray(self.pages),
            swa_pages=jnp.asarray(self.pages),
            tree_mask=None if self.tree_mask is None else jnp.asarray(self.tree_mask),
        )

    def arrays(self) -> tuple:
        """The arguments that every attention takes first."""
        return jnp.asarray(self.q), jnp.asarray(self.kv_layer), jnp.asarray(self.pages), self.batch


def visible(case: Case, row: int, query: int, window: int | None) -> list[int]:
    """The tokens of a row that one of its new tokens sees."""
    before = case.kv_lens[row] - case.q_lens[row]
    seen = []
    for token in range(case.kv_lens[row]):
        stands = token if token < before else case.positions[row, token - before]
        if token >= before:
            mask = case.tree_mask
            new = token - before
            if not (new <= query if mask is None else mask[row, query, new]):
                continue
        if window is None or case.positions[row, query] - stands < window:
            seen.append(token)
    return seen


def plain_attention(
    case: Case,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """float64[R, Q, Hq, D], 0 for queries that are off."""
    page_size, heads = case.kv_layer.shape[1], case.kv_layer.shape[2] // 2
    group = case.q.shape[2] // heads
    out = np.zeros(case.q.shape)
    for row, query, head in np.ndindex(case.q.shape[:3]):
        if query >= case.q_lens[row]:
            continue
        seen = visible(case, row, query, window)
        at = [(case.pages[row, t // page_size], t % page_size) for t in seen]
        k = np.array([case.kv_layer[p, o, 2 * (head // group)] for p, o in at], np.float64)
        v = np.array([case.kv_layer[p, o, 2 * (head // group) + 1] for p, o in at], np.float64)
        scores = k @ case.q[row, query, head].astype(np.float64) * scale
        if softcap is not None:
            scores = np.tanh(scores / softcap) * softcap
        if sinks is not None:
            scores = np.append(scores, sinks[head])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[row, query, head] = weights[: len(seen)] @ v
    return out


def make_case(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    *,
    queries: int,
    page_size: int,
    table: int,
    heads: int,
    group: int,
    dim: int,
    dead_below: int | None = None,
    tree: bool = False,
    garbage: float = 1e30,
) -> Case:
    """Rows of (tokens before, new tokens), pages in random order, garbage wherever nobody writes.

    Pages wholly further than `dead_below` tokens before the first new one are 0, as in the SWA
    table of an allocator with that window. The padding page is garbage too.
    """
    count = len(rows)
    before, q_lens = np.array(rows, np.int32).T
    kv_lens = before + q_lens
    total = count * table
    shape = (total + 1, page_size, 2 * heads, dim)
    kv_layer = np.where(rng.random(shape) < 0.5, garbage, -garbage).astype(np.float32)
    pages = (rng.permutation(total) + 1).reshape(count, table).astype(np.int32)
    for row in range(count):
        first = 0 if dead_below is None else max(before[row] - dead_below, 0) // page_size
        pages[row, :first] = 0
        for token in range(first * page_size, kv_lens[row]):
            place = pages[row, token // page_size], token % page_size
            kv_layer[place] = rng.standard_normal(shape[2:])
    positions = before[:, None] + np.arange(queries, dtype=np.int32)[None, :]
    mask = None
    if tree:
        depths, mask = draft_trees(rng, count, queries)
        positions = before[:, None] + depths
        for row in range(count):
            mask[row, :, q_lens[row] :] = True  # tokens that are not there, whatever this says
    q = rng.standard_normal((count, queries, heads * group, dim)).astype(np.float32)
    return Case(q, kv_layer, pages, positions.astype(np.int32), q_lens, kv_lens, mask)


def draft_trees(
    rng: np.random.Generator, count: int, queries: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random trees, each parent before its children: depths, and who is an ancestor or oneself."""
    depths = np.zeros((count, queries), np.int32)
    mask = np.zeros((count, queries, queries), bool)
    for row in range(count):
        mask[row, 0, 0] = True
        for node in range(1, queries):
            parent = rng.integers(node)
            depths[row, node] = depths[row, parent] + 1
            mask[row, node] = mask[row, parent]
            mask[row, node, node] = True
    return depths, mask
