"""The requests that the loop knows: waiting, running or done. Admitted in the order they came.

Legend: N places for requests, L max_context.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.paging import pages_for
from swa_jax.rank import exclusive_sum
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.requests import (
    CANCELLED,
    LENGTH,
    REJECTED,
    UNFINISHED,
    Requests,
    Sampling,
)

EMPTY, WAITING, RUNNING, DONE, HOSTED = range(5)  # HOSTED: its KV is on the host, see `hosted`
_LAST = 2**31 - 1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "status",
        "ticket",
        "retraction",
        "next_ticket",
        "tokens",
        "known",
        "prompt_lens",
        "limit",
        "cached",
        "reason",
        "sampling",
        "namespace",
        "ignore_eos",
        "vocab_size",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Queue:
    """All places for requests."""

    status: jax.Array  # int32[N] EMPTY, WAITING, RUNNING, DONE or HOSTED
    ticket: jax.Array  # int32[N] order of arrival, the oldest the least
    retraction: jax.Array  # int32[N] names the last leave for the host, 0 for none; see `hosted`
    next_ticket: jax.Array  # int32[]
    tokens: jax.Array  # int32[N, L] prompt, then output
    known: jax.Array  # int32[N] tokens of it that are there
    prompt_lens: jax.Array  # int32[N] tokens
    limit: jax.Array  # int32[N] tokens at which it ends
    cached: jax.Array  # int32[N] prompt tokens found in the cache at first admission, -1 before
    reason: jax.Array  # int32[N] UNFINISHED until it ends
    sampling: Sampling
    namespace: jax.Array  # int32[N]
    ignore_eos: jax.Array  # bool[N]
    vocab_size: jax.Array  # int32[] tokens are 0 .. vocab_size - 1


def empty_queue(places: int, columns: int, vocab_size: int) -> Queue:
    """A queue without requests."""

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    return Queue(
        status=zeros(places),
        ticket=zeros(places),
        retraction=zeros(places),
        next_ticket=zeros(),
        tokens=zeros(places, columns),
        known=zeros(places),
        prompt_lens=zeros(places),
        limit=zeros(places),
        cached=jnp.full(places, -1, jnp.int32),
        reason=zeros(places),
        sampling=Sampling(
            jnp.zeros(places, jnp.float32),
            zeros(places),
            jnp.ones(places, jnp.float32),
            zeros(places),
        ),
        namespace=zeros(places),
        ignore_eos=jnp.zeros(places, bool),
        vocab_size=jnp.int32(vocab_size),
    )


def can_be_served(config: ServingConfig, prompt_lens: jax.Array, limit: jax.Array) -> jax.Array:
    """bool[M] requests that fit when they run alone, recycling their windows."""
    pool: PoolConfig = config.pool
    held = jnp.maximum(limit - 1, prompt_lens)  # the last token generated is never read
    pages = pages_for(held, pool.page_size)
    fits = (prompt_lens > 0) & (limit <= jnp.int32(config.max_context))
    fits = fits & (limit - prompt_lens <= jnp.int32(config.output_columns))
    fits = fits & (pages <= jnp.int32(config.most_request_pages))
    if pool.sliding_window is None:
        fits = fits & (pages <= jnp.int32(pool.swa_pages))
    return fits


def enter(config: ServingConfig, queue: Queue, requests: Requests) -> tuple[Queue, jax.Array]:
    """Puts requests into empty places, in their order.

    Args:
      config: what is served.
      queue: before the call.
      requests: M of them.

    Returns:
      The queue, and int32[M] the place of each, -1 where none was left or the prompt has no tokens.
      A request that can never be served is done at once, as rejected; one that wants no tokens is
      done too.
    """
    count, places = requests.prompt_lens.shape[0], queue.status.shape[0]
    lens = requests.prompt_lens
    empty = jnp.argsort(queue.status != EMPTY, stable=True).astype(jnp.int32)
    room = jnp.sum(queue.status == EMPTY, dtype=jnp.int32)
    order = exclusive_sum((lens > 0).astype(jnp.int32))
    enters = (lens > 0) & (order < room)
    taken = jnp.where(enters, empty[jnp.minimum(order, places - 1)], places)
    limit = lens + jnp.minimum(requests.max_new_tokens, jnp.int32(_LAST) - jnp.maximum(lens, 0))
    good = can_be_served(config, lens, limit) & _is_known(queue, requests)
    reason = jnp.where(good, jnp.where(limit > lens, UNFINISHED, LENGTH), REJECTED)
    tokens = requests.tokens[:, : queue.tokens.shape[1]]  # a longer prompt is rejected
    shown = jnp.clip(lens, 0, tokens.shape[1])

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[taken].set(new, mode="drop")

    width = queue.tokens.shape[1] - tokens.shape[1]
    entered = replace(
        queue,
        status=put(queue.status, jnp.where(reason == UNFINISHED, WAITING, DONE)),
        ticket=put(queue.ticket, queue.next_ticket + order),
        retraction=put(queue.retraction, jnp.zeros(count, jnp.int32)),
        next_ticket=queue.next_ticket + jnp.sum(enters, dtype=jnp.int32),
        tokens=put(queue.tokens, jnp.pad(tokens, ((0, 0), (0, width)))),
        known=put(queue.known, shown),
        prompt_lens=put(queue.prompt_lens, shown),
        limit=put(queue.limit, limit),
        cached=put(queue.cached, jnp.full(count, -1, jnp.int32)),
        reason=put(queue.reason, reason.astype(jnp.int32)),
        sampling=jax.tree.map(put, queue.sampling, requests.sampling),
        namespace=put(queue.namespace, requests.namespace),
        ignore_eos=put(queue.ignore_eos, requests.ignore_eos),
    )
    return entered, jnp.where(taken < places, taken, -1)


def _is_known(queue: Queue, requests: Requests) -> jax.Array:
    """bool[M] every token of the prompt is in the vocabulary."""
    column = jnp.arange(requests.tokens.shape[1], dtype=jnp.int32)[None, :]
    counts = column < requests.prompt_lens[:, None]
    foreign = (requests.tokens < 0) | (requests.tokens >= queue.vocab_size)
    return ~jnp.any(counts & foreign, axis=1)


def leave(queue: Queue, places: jax.Array) -> Queue:
    """Empties int32[M] places whose request is done; -1 and others are left as they are."""
    inside = (places >= 0) & (places < queue.status.shape[0])
    done = inside & (queue.status[jnp.where(inside, places, 0)] == DONE)
    at = jnp.where(done, places, queue.status.shape[0])
    return replace(queue, status=queue.status.at[at].set(EMPTY, mode="drop"))


def cancel(queue: Queue, places: jax.Array) -> Queue:
    """Ends int32[M] requests: running ones in the next step, others at once; -1 for none."""
    inside = (places >= 0) & (places < queue.status.shape[0])
    status = queue.status[jnp.where(inside, places, 0)]
    rests = (status == WAITING) | (status == HOSTED)
    is_open = inside & (rests | (status == RUNNING))
    is_open = is_open & (queue.reason[jnp.where(inside, places, 0)] == UNFINISHED)
    at = jnp.where(is_open, places, queue.status.shape[0])
    return replace(
        queue,
        reason=queue.reason.at[at].set(CANCELLED, mode="drop"),
        status=queue.status.at[jnp.where(rests, at, queue.status.shape[0])].set(DONE, mode="drop"),
    )


def oldest_waiting(queue: Queue) -> jax.Array:
    """int32[] the waiting request that came first; look at `status` whether there is one."""
    return jnp.argmin(jnp.where(queue.status == WAITING, queue.ticket, _LAST)).astype(jnp.int32)


def open_requests(queue: Queue) -> jax.Array:
    """bool[] some request waits or runs."""
    return jnp.any((queue.status == WAITING) | (queue.status == RUNNING))
