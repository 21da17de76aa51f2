"""What the published checkpoints call each array, and which of them they keep turned over."""

from dataclasses import dataclass

from swa_jax.models.decoder.config import GEMMA_3, DecoderConfig
from swa_jax.models.decoder.params import Shape, layer_shapes, model_shapes

_MODEL = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembed": "lm_head.weight",
}
_LAYER = {
    "input_norm": "input_layernorm.weight",
    **{key: f"self_attn.{key}_proj.weight" for key in "qkvo"},
    **{f"{key}_bias": f"self_attn.{key}_proj.bias" for key in "qkvo"},
    "sinks": "self_attn.sinks",
}
_GEMMA_3 = {
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "pre_mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
    **{key: f"mlp.{key}_proj.weight" for key in ("gate", "up", "down")},
}
_GPT_OSS = {
    "pre_mlp_norm": "post_attention_layernorm.weight",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "gate_up": "mlp.experts.gate_up_proj",
    "gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "down": "mlp.experts.down_proj",
    "down_bias": "mlp.experts.down_proj_bias",
}
# As published by a linear layer: [out, in]. Here all matrices are [in, out].
_TURNED = {"unembed", "q", "k", "v", "o", "gate", "up", "down", "router"}

TIED_UNEMBED = _MODEL["unembed"]  # some tied checkpoints keep a copy under this name
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")


@dataclass(frozen=True)
class Published:
    """One array of a checkpoint."""

    name: str
    shape: Shape  # as published
    layer: int | None  # None: outside the layers
    key: str  # in the parameters
    turned: bool  # published [out, in]


def published_arrays(config: DecoderConfig) -> list[Published]:
    """Every array that a checkpoint of the model has."""
    arrays = [_array(_MODEL[key], shape, None, key) for key, shape in model_shapes(config).items()]
    names = _LAYER | (_GEMMA_3 if config.family == GEMMA_3 else _GPT_OSS)
    shapes = layer_shapes(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        arrays += [_array(prefix + names[key], shapes[key], layer, key) for key in shapes]
    return arrays


def _array(name: str, shape: Shape, layer: int | None, key: str) -> Published:
    turned = key in _TURNED and len(shape) == 2  # the experts' `down` is kept as it multiplies
    return Published(name, shape[::-1] if turned else shape, layer, key, turned)


def text_name(name: str) -> str | None:
    """The name that an array has in a text-only checkpoint; None: it is of another part.

    Gemma 3 with vision is published as `language_model.model.*`, and as `model.language_model.*`
    by newer programs, beside `vision_tower` and `multi_modal_projector`.
    """
    bare = name.removeprefix("model.")
    if bare.startswith(_OTHER_PARTS):
        return None
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")  # language_model.lm_head.weight
