"""What the tokens of a trace's prompts are, as far as the trace tells.

A trace names the 512-token blocks of a prompt by ids: equal ids mean equal prompts up to and with
that block. Tokens made from them are equal where the trace says so, and nowhere else but by chance.
What a request generates is its own.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.prefix_cache.keys import ReadTokens, mix
from swa_jax.replay.trace import Trace


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["prompt_lens", "blocks"],
    meta_fields=["block_tokens"],
)
@dataclass(frozen=True)
class Content:
    """Block ids of every request."""

    prompt_lens: jax.Array  # int32[N]
    blocks: jax.Array  # int32[N, most blocks of a prompt]
    block_tokens: int  # static


def content_of(trace: Trace) -> Content | None:
    """The content of a trace, None where it has no ids."""
    if trace.hash_ids is None or trace.block_tokens is None:
        return None
    # Ids are renamed to 0, 1, 2, ...: only their equality counts, and any integer may come.
    flat = np.concatenate([np.asarray(ids, np.int64) for ids in trace.hash_ids])
    _, named = np.unique(flat, return_inverse=True)
    counts = np.array([len(ids) for ids in trace.hash_ids])
    blocks = np.zeros((len(counts), int(counts.max(initial=1))), np.int32)
    blocks[np.arange(blocks.shape[1])[None, :] < counts[:, None]] = named
    lengths = jnp.asarray(trace.prompt_lens, jnp.int32)
    return Content(lengths, jnp.asarray(blocks), int(trace.block_tokens))


def request_tokens(
    content: Content, request: jax.Array, room: int, first: jax.Array | int = 0
) -> jax.Array:
    """int32[room] prompt and output tokens of a request, from place `first` on."""
    place = jnp.int32(first) + jnp.arange(room, dtype=jnp.int32)
    block = jax.lax.div(place, jnp.int32(content.block_tokens))
    ids = content.blocks[request].at[block].get(mode="fill", fill_value=0)
    in_prompt = place < content.prompt_lens[request]
    # Two streams that do not meet: block ids are even here, requests odd.
    source = jnp.where(in_prompt, ids * 2, request * 2 + 1).astype(jnp.uint32)
    offset = jnp.where(in_prompt, place - block * jnp.int32(content.block_tokens), place)
    bits = mix(mix(source + jnp.uint32(1)) ^ (offset.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)))
    return (bits >> 1).astype(jnp.int32)


def reader_of(content: Content, request: jax.Array) -> ReadTokens:
    """Reads these tokens, for what looks at no more of them than it must."""

    def read(first: jax.Array, count: int) -> jax.Array:
        return request_tokens(content, request, count, first)

    return read
