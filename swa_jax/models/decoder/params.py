"""The parameters: a pytree of arrays, their shapes, and random ones.

Legend: V vocabulary, H hidden size, D head size, I width of the MLP or of an expert, E experts.
"""

import functools
import itertools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from swa_jax.models.decoder.config import DecoderConfig

Weights: TypeAlias = dict[str, jax.Array]  # of one layer
Params: TypeAlias = dict[str, Any]  # embed, final_norm, unembed where not tied, layers
Shape: TypeAlias = tuple[int, ...]


def layer_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """The shape of each array of one layer, the same for full and SWA layers."""
    return _norm_shapes(config) | _attention_shapes(config) | _mlp_shapes(config)


def _norm_shapes(config: DecoderConfig) -> dict[str, Shape]:
    names = ["input_norm", "pre_mlp_norm"]
    if config.norms_outputs:
        names += ["post_attention_norm", "post_mlp_norm"]
    return dict.fromkeys(names, (config.hidden_size,))


def _attention_shapes(config: DecoderConfig) -> dict[str, Shape]:
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "q": (hidden, queries),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "o": (queries, hidden),
    }
    if config.attention_bias:
        shapes |= {f"{name}_bias": shape[1:] for name, shape in shapes.items()}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.sinks:
        shapes |= {"sinks": (config.num_heads,)}
    return shapes


def _mlp_shapes(config: DecoderConfig) -> dict[str, Shape]:
    hidden, width, experts = config.hidden_size, config.intermediate_size, config.num_experts
    if not experts:
        return {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    return {
        "router": (hidden, experts),
        "router_bias": (experts,),
        "gate_up": (experts, hidden, 2 * width),
        "gate_up_bias": (experts, 2 * width),
        "down": (experts, width, hidden),
        "down_bias": (experts, hidden),
    }


def model_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """The shape of each array outside the layers."""
    shapes: dict[str, Shape] = {
        "embed": (config.vocab_size, config.hidden_size),
        "final_norm": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["unembed"] = (config.hidden_size, config.vocab_size)
    return shapes


def num_params(config: DecoderConfig) -> int:
    """Numbers in all arrays of a model."""
    layer = sum(map(math.prod, layer_shapes(config).values()))
    return sum(map(math.prod, model_shapes(config).values())) + config.num_layers * layer


def random_params(config: DecoderConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters, scaled so that values stay near 1 through the layers.

    Args:
      config: the model.
      key: a PRNG key.
      dtype: of every array.

    Returns:
      {"embed": [V, H], "final_norm": [H], "unembed": [H, V] unless tied, "layers": a tuple with a
      dict for each layer, see `layer_shapes`}.
    """
    outer, *inner = jax.random.split(key, config.num_layers + 1)
    form = jnp.dtype(dtype)
    params: Params = _random_group(config, tuple(model_shapes(config).items()), form, outer)
    shapes = tuple(layer_shapes(config).items())
    params["layers"] = tuple(_random_group(config, shapes, form, key) for key in inner)
    return params


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_group(
    config: DecoderConfig, shapes: tuple[tuple[str, Shape], ...], dtype: jnp.dtype, key: jax.Array
) -> Weights:
    """Arrays of some names and shapes; compiled once for all layers."""
    sizes = [math.prod(shape) for _, shape in shapes]
    # One draw for all: each drawing takes its share of the time to compile.
    noise = jax.random.normal(key, (sum(sizes),), jnp.float32)
    pieces = jnp.split(noise, list(itertools.accumulate(sizes[:-1])))
    return {
        name: _scaled(config, name, piece.reshape(shape)).astype(dtype)
        for (name, shape), piece in zip(shapes, pieces, strict=True)
    }


def _scaled(config: DecoderConfig, name: str, noise: jax.Array) -> jax.Array:
    """Norms scale by about 1, products keep the size of what they are given."""
    if name.endswith("_norm"):
        return jnp.float32(1.0 - config.norm_offset) + jnp.float32(0.1) * noise
    if name.endswith("_bias"):
        return jnp.float32(0.1) * noise
    if name == "sinks":
        return noise
    if name == "embed":
        return noise * jnp.float32(1.0 / config.embed_scale)
    return noise * jnp.float32(noise.shape[-2] ** -0.5)
