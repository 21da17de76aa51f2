"""The whole loop as one program, and the same loop a bounded number of steps at a time."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.inputs import Ints, as_int32
from swa_jax.models.decoder import DecoderConfig
from swa_jax.prefix_cache import PrefixCache
from swa_jax.serving import queue as queues
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.ready import can_go_on
from swa_jax.serving.requests import Requests
from swa_jax.serving.step import step
from swa_jax.serving.trees import Tree
from swa_jax.serving.world import Stats, World, check_world, new_world
from swa_jax.state import AllocatorState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "finish_reasons", "stats", "state", "cache", "cached"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Served:
    """What `serve` gives. N requests, O `ServingConfig.output_columns`."""

    tokens: jax.Array  # int32[N, O] generated tokens, 0 past `lengths`
    lengths: jax.Array  # int32[N] how many
    finish_reasons: jax.Array  # int32[N], in words by `FINISH_REASONS`
    stats: Stats
    state: AllocatorState  # nothing is held but the cache
    cache: PrefixCache | None
    cached: jax.Array  # int32[N] prompt tokens that the cache had


def serve(
    model: ServingModel | DecoderConfig,
    params: Tree,
    requests: Requests,
    config: ServingConfig,
    *,
    draft_params: Tree = None,
) -> Served:
    """Serves requests from the first admission to the last token in one compiled program.

    Args:
      model: a `DecoderConfig`, or any `ServingModel`; static.
      params: of the model.
      requests: N of them, of `make_requests`; admitted in their order.
      config: sizes and choices; static.
      draft_params: of `config.draft`, where it has any.

    Returns:
      `Served`. A request that can never fit is rejected and changes nothing for the others; all
      others end, however small the pools: when memory runs out the newest waits again, and the
      oldest always makes progress.

    Raises:
      ValueError: the configuration of a prefill worker, where no request comes to its end.
    """
    if config.only_prefills:
        raise ValueError(
            'serve needs role="both", got role="prefill": a prefill worker is driven by run_steps'
        )
    return _serve(as_model(model), config, params, draft_params, requests)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _serve(
    model: ServingModel, config: ServingConfig, params: Tree, draft_params: Tree, requests: Requests
) -> Served:
    world = new_world(model, config, requests.prompt_lens.shape[0])
    world = submit(config, world, requests)[0]
    world = _run(model, config, params, draft_params, world, None)
    queue = world.queue
    tokens, lengths = outputs(config, world, jnp.arange(queue.status.shape[0], dtype=jnp.int32))
    return Served(
        tokens=tokens,
        lengths=lengths,
        finish_reasons=queue.reason,
        stats=world.stats,
        state=world.allocator,
        cache=world.cache,
        cached=jnp.maximum(queue.cached, 0),
    )


def _run(
    model: ServingModel,
    config: ServingConfig,
    params: Tree,
    draft_params: Tree,
    world: World,
    steps: jax.Array | None,
) -> World:
    body = functools.partial(step, model, config, params, draft_params)
    if steps is None:
        return jax.lax.while_loop(unfinished, body, world)

    def go_on(carry: tuple[World, jax.Array]) -> jax.Array:
        return can_go_on(config, carry[0]) & (carry[1] > 0)

    def one(carry: tuple[World, jax.Array]) -> tuple[World, jax.Array]:
        return body(carry[0]), carry[1] - 1

    return jax.lax.while_loop(go_on, one, (world, steps))[0]


def submit(config: ServingConfig, world: World, requests: Requests) -> tuple[World, jax.Array]:
    """Adds requests to the queue, between two calls of `run_steps` or inside a program.

    Args:
      config: static.
      world: before the call.
      requests: M of them; one of 0 tokens is no request and takes no place, so that a batch can be
        padded to a size that is compiled already.

    Returns:
      The world, and int32[M] the place of each in the queue; -1 for a request that was not taken
      since no place was left, or that has no tokens. Submit it again when `release` has made room.
    """
    check_world(config, world)
    queue, places = queues.enter(config, world.queue, requests)
    return _with_queue(world, queue), places


def unfinished(world: World) -> jax.Array:
    """bool[] some request waits or runs."""
    return queues.open_requests(world.queue)


def cancel(world: World, places: Ints) -> World:
    """Ends int32[M] requests; their pages go back in the next step. -1 and ended ones: nothing."""
    return _with_queue(world, queues.cancel(world.queue, as_int32("places", places, 1)))


def release(world: World, places: Ints) -> World:
    """Forgets int32[M] requests that are done, so that others can have their places."""
    return _with_queue(world, queues.leave(world.queue, as_int32("places", places, 1)))


def _with_queue(world: World, queue: queues.Queue) -> World:
    # What did not fit may fit now, or be gone.
    return replace(world, queue=queue, refused_at=jnp.full((), -1, jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def _run_steps(
    model: ServingModel,
    config: ServingConfig,
    params: Tree,
    draft_params: Tree,
    steps: jax.Array,
    world: World,
) -> World:
    return _run(model, config, params, draft_params, world, steps)


def run_steps(
    model: ServingModel | DecoderConfig,
    params: Tree,
    config: ServingConfig,
    world: World,
    steps: ArrayLike,
    *,
    draft_params: Tree = None,
) -> World:
    """Runs up to so many steps, or until nothing waits or runs.

    On a prefill worker: or until what is left is ready to be sent, or waits for that.

    Args:
      model: static.
      params: of the model.
      config: static.
      world: taken over: its buffers are reused, so go on with what comes back.
      steps: int32[]; another number needs no new compilation.
      draft_params: of `config.draft`.
    """
    check_world(config, world)
    count = as_int32("steps", steps, 0)
    return _run_steps(as_model(model), config, params, draft_params, count, world)


def finish_reasons(world: World, places: Ints) -> tuple[jax.Array, jax.Array]:
    """Whether and why int32[M] requests have ended.

    Returns:
      bool[M] done: all of its tokens are there and `release` can have its place; and int32[M]
      reasons, in words by `FINISH_REASONS`. False and "unfinished" for -1.
    """
    at = as_int32("places", places, 1)
    inside = jnp.clip(at, 0, world.queue.status.shape[0] - 1)
    done = (at == inside) & (world.queue.status[inside] == queues.DONE)
    return done, jnp.where(done, world.queue.reason[inside], 0)


def outputs(config: ServingConfig, world: World, places: Ints) -> tuple[jax.Array, jax.Array]:
    """What int32[M] requests have generated so far.

    Returns:
      int32[M, O] tokens, 0 past the end, and int32[M] how many: none for -1.
    """
    queue, width = world.queue, config.output_columns
    at = as_int32("places", places, 1)
    inside = jnp.clip(at, 0, queue.status.shape[0] - 1)
    start = queue.prompt_lens[inside]
    known = jnp.where(at == inside, queue.known[inside], start)
    column = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    within = column < known[:, None]
    at = jnp.minimum(column, jnp.int32(queue.tokens.shape[1] - 1))
    tokens = jnp.take_along_axis(queue.tokens[inside], at, axis=1, mode="clip")
    return jnp.where(within, tokens, 0), known - start
