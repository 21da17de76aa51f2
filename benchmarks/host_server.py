"""A serving loop on the host, as today's engines have it: Python lists hold the pages.

The same model, the same chunks, the same order of requests as the compiled loop without a prefix
cache; only the bookkeeping differs. Each step the host deals pages, builds the page tables with
NumPy, calls one compiled pass and reads its tokens back.
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.models import PagedBatch
from swa_jax.serving import ServingConfig, ServingModel
from swa_jax.serving.trees import Tree


@dataclass
class Row:
    """A running request and its pages."""

    text: list[int]
    limit: int
    index: int
    length: int = 0
    full: list[int] = field(default_factory=list)  # pages in token order
    swa: list[int] = field(default_factory=list)  # the same, 0 where the page left the window


class HostServer:
    """Serves a batch of prompts greedily."""

    def __init__(self, model: ServingModel, params: Tree, config: ServingConfig) -> None:
        """Fresh pools."""
        self.model, self.params, self.config = model, params, config
        pool = config.pool
        self.size = pool.page_size
        self.free_full = list(range(pool.full_pages, 0, -1))
        self.free_swa = list(range(pool.swa_pages, 0, -1))
        self.kv = model.init_kv(pool)
        self.steps = 0

    def serve(self, prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        """The generated tokens of each prompt. Pools must hold `max_running` requests at once."""
        waiting = list(range(len(prompts)))
        rows: list[Row | None] = [None] * self.config.max_running
        done: dict[int, list[int]] = {}
        while waiting or any(rows):
            self.steps += 1
            for place, row in enumerate(rows):
                if row is not None and len(row.text) == row.limit:
                    done[row.index] = row.text[len(prompts[row.index]) :]
                    self._give_back(row)
                    rows[place] = None
                elif row is not None:
                    self._leave_window(row)
            for place, row in enumerate(rows):
                if row is None and waiting:
                    index = waiting.pop(0)
                    text = list(prompts[index])
                    rows[place] = Row(text, len(text) + new[index], index)
            decoding = [row if row and len(row.text) - row.length == 1 else None for row in rows]
            prefilling = [row for row in rows if row and len(row.text) - row.length > 1]
            if any(decoding):
                self._decode(decoding)
            if prefilling:
                oldest = sorted(prefilling, key=lambda row: row.index)
                self._prefill(oldest[: self.config.prefill_rows])
        return [done[index] for index in range(len(prompts))]

    def _extend(self, row: Row, count: int) -> None:
        for _ in range(-(-(row.length + count) // self.size) - len(row.full)):
            row.full.append(self.free_full.pop())
            row.swa.append(self.free_swa.pop())

    def _leave_window(self, row: Row) -> None:
        dead = max(0, row.length - (self.config.pool.sliding_window or row.length)) // self.size
        for place in range(dead):
            if row.swa[place]:
                self.free_swa.append(row.swa[place])
                row.swa[place] = 0

    def _give_back(self, row: Row) -> None:
        self.free_full += row.full
        self.free_swa += [page for page in row.swa if page]

    def _batch(self, rows: list[Row | None], counts: list[int], width: int) -> PagedBatch:
        pages = self.config.table_pages
        shape = (len(rows), width)
        tokens, places = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        slots = np.zeros((2, *shape), np.int32)
        tables = np.zeros((2, len(rows), pages), np.int32)
        held = np.zeros(len(rows), np.int32)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if row is None or not count:
                continue
            self._extend(row, count)
            span = np.arange(row.length, row.length + count)
            tokens[index, :count] = row.text[row.length : row.length + count]
            places[index, :count] = span
            for side, own in enumerate((row.full, row.swa)):
                table = np.array(own, np.int32)
                tables[side, index, : len(own)] = table
                slots[side, index, :count] = table[span // self.size] * self.size + span % self.size
            held[index] = row.length + count
        put = jnp.asarray
        return PagedBatch(
            tokens=put(tokens),
            positions=put(places),
            q_lens=put(np.array(counts, np.int32)),
            kv_lens=put(held),
            full_slots=put(slots[0]),
            swa_slots=put(slots[1]),
            full_pages=put(tables[0]),
            swa_pages=put(tables[1]),
        )

    def _decode(self, rows: list[Row | None]) -> None:
        counts = [0 if row is None else 1 for row in rows]
        chosen, self.kv = _choose(self.model, self.params, self.kv, self._batch(rows, counts, 1))
        for row, token in zip(rows, np.asarray(chosen)[:, 0].tolist(), strict=True):
            if row is not None:
                row.length += 1
                row.text.append(token)

    def _prefill(self, rows: list[Row]) -> None:
        chunk = self.config.chunk_tokens
        padded: list[Row | None] = [*rows, *[None] * (self.config.prefill_rows - len(rows))]
        counts = [
            0 if row is None else min(chunk, len(row.text) - 1 - row.length) for row in padded
        ]
        self.kv = _fill(self.model, self.params, self.kv, self._batch(padded, counts, chunk))
        for row, count in zip(padded, counts, strict=True):
            if row is not None:
                row.length += count


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _choose(
    model: ServingModel, params: Tree, kv: Tree, batch: PagedBatch
) -> tuple[jax.Array, Tree]:
    hidden, kv = model.forward(params, kv, batch)
    return jnp.argmax(model.unembed(params, hidden), axis=-1).astype(jnp.int32), kv


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _fill(model: ServingModel, params: Tree, kv: Tree, batch: PagedBatch) -> Tree:
    return model.forward(params, kv, batch)[1]
