"""A model's config.json, read into a `DecoderConfig` and written from one.

Both forms of it are read: `rope_theta`, `rope_scaling`, `rope_local_base_freq` and
`sliding_window_pattern` as models were published with, and the `rope_parameters` and `layer_types`
that transformers 5 writes.
"""

from collections.abc import Mapping
from typing import Any

from swa_jax.models.decoder.config import GEMMA_3, GPT_OSS, DecoderConfig
from swa_jax.models.decoder.published_rope import read_rope, write_rope
from swa_jax.models.decoder.published_values import (
    Json,
    boolean,
    number,
    part,
    positive,
    token_ids,
)
from swa_jax.models.model_config import FULL, SWA
from swa_jax.replay.trace_lines import show

MAX_LAYERS = 4096  # of a model: what is not there is named layer by layer

_KINDS = {"full_attention": FULL, "sliding_attention": SWA}
_KIND_NAMES = {kind: name for name, kind in _KINDS.items()}

# What a key means where a config.json leaves it out, as many of the published ones do: the
# defaults of transformers' Gemma3TextConfig and GptOssConfig.
_GEMMA_3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_GPT_OSS_DEFAULTS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "rope_theta": 150_000.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ARCHITECTURES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
}


def config_from_hf(published: Json) -> DecoderConfig:
    """Reads the content of a config.json.

    Args:
      published: of a Gemma3ForCausalLM, a Gemma3ForConditionalGeneration (its text model) or a
        GptOssForCausalLM.

    Returns:
      What the decoder computes.

    Raises:
      ValueError: another model, or a setting that the decoder does not have: bidirectional
        attention, other rope scalings, layers that are neither full nor sliding, other
        activations. The message names the key and the value.
    """
    kind = _model_type(published)
    if kind == "gpt_oss":
        return _gpt_oss(published)
    if kind == "gemma3":
        text = published.get("text_config")
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config must be an object, got {show(text)}")
        # The whole model's settings come first where both have one.
        shared = ("tie_word_embeddings", "eos_token_id", "quantization_config")
        given = {key: published[key] for key in shared if published.get(key) is not None}
        return _gemma_3({**text, **given})
    return _gemma_3(published)


def _model_type(published: Json) -> str:
    names, kind = published.get("architectures") or [], published.get("model_type")
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures must be a list of names, got {show(names)}")
    known = [_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES]
    if known:
        return known[0]
    if names or not isinstance(kind, str) or kind not in _ARCHITECTURES.values():
        raise ValueError(
            f"the decoder runs {', '.join(_ARCHITECTURES)}; got architectures {show(names)} and "
            f"model_type {show(kind)}"
        )
    return kind


def _gemma_3(published: Json) -> DecoderConfig:
    values = _with_defaults(_GEMMA_3_DEFAULTS, published)
    for key in ("use_bidirectional_attention", "quantization_config"):
        if values.get(key):
            raise ValueError(f"{key} is not supported for Gemma 3, got {show(values[key])}")
    given = part(values, "rope_parameters")
    full = part(given, "full_attention") or part(values, "rope_scaling")
    local = part(given, "sliding_attention")
    context = positive(values, "max_position_embeddings")
    hidden = positive(values, "hidden_size")
    return DecoderConfig(
        family=GEMMA_3,
        **_sizes(values),
        full_rope=read_rope({"rope_theta": values["rope_theta"], **full}, context),
        swa_rope=read_rope({"rope_theta": values["rope_local_base_freq"], **local}, context),
        attention_scale=positive(values, "query_pre_attn_scalar") ** -0.5,
        attn_softcap=_softcap(values, "attn_logit_softcapping"),
        final_softcap=_softcap(values, "final_logit_softcapping"),
        qk_norm=True,
        embed_scale=hidden**0.5,
        activation=values["hidden_activation"],
    )


def _gpt_oss(published: Json) -> DecoderConfig:
    values = _with_defaults(_GPT_OSS_DEFAULTS, published)
    if values["hidden_act"] != "silu":
        raise ValueError(f"hidden_act must be 'silu' for gpt-oss, got {show(values['hidden_act'])}")
    method = part(values, "quantization_config").get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ValueError(f"quant_method must be 'mxfp4' for gpt-oss, got {show(method)}")
    given = part(values, "rope_scaling") or part(values, "rope_parameters") or _GPT_OSS_ROPE
    context = positive(values, "max_position_embeddings")
    rope = read_rope({"rope_theta": values["rope_theta"], **given}, context)
    return DecoderConfig(
        family=GPT_OSS,
        **_sizes(values),
        full_rope=rope,
        swa_rope=rope,
        attention_scale=positive(values, "head_dim") ** -0.5,
        sinks=True,
        activation="silu",
        num_experts=positive(values, "num_local_experts"),
        experts_per_token=positive(values, "num_experts_per_tok"),
        swiglu_limit=number(values, "swiglu_limit"),
        swiglu_alpha=number(values, "swiglu_alpha"),
    )


def _with_defaults(defaults: Json, published: Json) -> dict[str, Any]:
    """What the file says, else the default; a null is the absence of a setting that has one."""
    given = {key: value for key, value in published.items() if value is not None}
    merged = {**defaults, **given}
    if "eos_token_id" in published and published["eos_token_id"] is None:
        merged.pop("eos_token_id", None)  # "none" and "the usual one" are two things here
    return merged


def _sizes(values: Json) -> dict[str, Any]:
    """The fields that both families have under the same keys."""
    return {
        "vocab_size": positive(values, "vocab_size"),
        "hidden_size": positive(values, "hidden_size"),
        "num_heads": positive(values, "num_attention_heads"),
        "kv_heads": positive(values, "num_key_value_heads"),
        "head_dim": positive(values, "head_dim"),
        "intermediate_size": positive(values, "intermediate_size"),
        "layer_kinds": _layer_kinds(values),
        "sliding_window": positive(values, "sliding_window"),
        "max_context": positive(values, "max_position_embeddings"),
        "norm_eps": number(values, "rms_norm_eps"),
        "attention_bias": boolean(values, "attention_bias"),
        "tie_embeddings": boolean(values, "tie_word_embeddings"),
        "eos_token_ids": token_ids(values.get("eos_token_id")),
    }


def _layer_kinds(values: Json) -> str:
    count = positive(values, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {MAX_LAYERS}, got {count}")
    names = values.get("layer_types")
    if names is None:
        period = positive(values, "sliding_window_pattern")
        return "".join(SWA if (place + 1) % period else FULL for place in range(count))
    if not isinstance(names, list | tuple):
        raise ValueError(f"layer_types must be a list, got {show(names)}")
    known = [name for name in names if isinstance(name, str) and name in _KINDS]
    if len(known) != len(names) or len(names) != count:
        unknown = next((name for name in names if name not in list(_KINDS)), None)
        more = "" if len(known) == len(names) else f" with {show(unknown)}"
        raise ValueError(
            f"layer_types must name {count} layers (num_hidden_layers), each one of "
            f"{list(_KINDS)}, got {len(names)}{more}"
        )
    return "".join(_KINDS[name] for name in names)


def _softcap(values: Json, key: str) -> float | None:
    return None if values.get(key) is None else number(values, key)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The content of a config.json that `config_from_hf` and transformers read.

    Raises:
      ValueError: a configuration that this form has no words for, such as a Gemma with sinks.
    """
    gemma = config.family == GEMMA_3
    published = _write_shared(config) | (
        _write_gemma_3(config) if gemma else _write_gpt_oss(config)
    )
    if config_from_hf(published) != config:
        raise ValueError(
            f"a config.json of {published['architectures'][0]} cannot describe {config!r}; it "
            f"would be read as {config_from_hf(published)!r}"
        )
    return published


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    ids = list(config.eos_token_ids)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "sliding_window": config.sliding_window,
        "layer_types": [_KIND_NAMES[kind] for kind in config.layer_kinds],
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
    }


def _write_gemma_3(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": config.activation,
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "attn_logit_softcapping": config.attn_softcap,
        "final_logit_softcapping": config.final_softcap,
        "rope_parameters": {
            "full_attention": write_rope(config.full_rope),
            "sliding_attention": write_rope(config.swa_rope),
        },
    }


def _write_gpt_oss(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": config.activation,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
        "rope_parameters": write_rope(config.full_rope),
    }
