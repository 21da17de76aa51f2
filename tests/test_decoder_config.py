"""Reading config.json: what was published, what transformers writes, and what is refused."""

from dataclasses import replace

import decoder_server as server
import pytest
import torch
import transformers

from swa_jax.models import config_from_hf, get_model, num_params
from swa_jax.models.decoder.published_config import config_to_hf
from swa_jax.models.decoder.rope import Rope

# As on the publishers' pages, without what the decoder has no use for.
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PUBLISHED = {"gemma-3-1b": GEMMA_3_1B, "gemma-3-4b": GEMMA_3_4B, "gpt-oss-20b": GPT_OSS_20B}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_agrees_with_the_table_of_models(name):
    config, known = config_from_hf(PUBLISHED[name]), get_model(name)
    assert (config.num_layers, len(config.full_layers)) == (known.num_layers, known.num_full_layers)
    assert (config.kv_heads, config.head_dim) == (known.kv_heads, known.head_dim)
    assert (config.sliding_window, config.past_window) == (known.sliding_window, known.past_window)
    assert config.layer_kinds.startswith(known.layer_pattern)
    assert config.max_context == known.max_context


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_means_what_transformers_makes_of_it(name):
    published = dict(PUBLISHED[name])
    kind = published.pop("model_type")
    theirs = transformers.AutoConfig.for_model(kind, **published)
    assert config_from_hf(theirs.to_dict()) == config_from_hf(PUBLISHED[name])


def test_older_files_say_type_for_rope_type():
    rope = {"type": "linear", "factor": 2}
    assert config_from_hf({**GEMMA_3_1B, "rope_scaling": rope}).full_rope.scaling == "linear"


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_what_is_left_out_is_what_transformers_takes(name):
    left_out = {"model_type": name}
    if name == "gpt_oss":
        left_out["num_hidden_layers"] = 3
    theirs = transformers.AutoConfig.for_model(**left_out).to_dict()
    assert config_from_hf(left_out) == config_from_hf(theirs)


def test_the_numbers_of_published_models():
    small, medium = config_from_hf(GEMMA_3_1B), config_from_hf(GEMMA_3_4B)
    assert small.full_layers == (5, 11, 17, 23)
    assert (small.full_rope, small.swa_rope) == (Rope(1e6), Rope(1e4))
    assert (medium.full_rope, medium.swa_rope) == (Rope(1e6, "linear", 8.0), Rope(1e4))
    assert (small.attention_scale, small.embed_scale) == (1 / 16, 1152**0.5)
    assert small.tie_embeddings
    assert small.eos_token_ids == medium.eos_token_ids == (1, 106)
    large = config_from_hf(GPT_OSS_20B)
    assert large.full_rope.amplitude == pytest.approx(1.3465736)  # 0.1 ln 32 + 1
    assert (large.num_experts, large.experts_per_token, large.swiglu_alpha) == (32, 4, 1.702)
    assert hash(large) == hash(replace(large))


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt-oss-20b"])
def test_num_params_is_what_transformers_counts(name):
    unpacked = {**PUBLISHED[name], "quantization_config": None}
    config = transformers.AutoConfig.for_model(**unpacked)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert num_params(config_from_hf(PUBLISHED[name])) == theirs.num_parameters()


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (GEMMA_3_1B, {"architectures": ["LlamaForCausalLM"]}, "Gemma3ForCausalLM.*'LlamaFor"),
        (GEMMA_3_1B, {"architectures": None, "model_type": "llama"}, "model_type 'llama'"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_3_1B, {"quantization_config": {"quant_method": "awq"}}, "quantization.*awq"),
        (GEMMA_3_1B, {"hidden_activation": "relu"}, "activation must be one of .*'relu'"),
        (GEMMA_3_1B, {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        (GEMMA_3_1B, {"hidden_size": 11.5}, "hidden_size must be .*got 11.5"),
        (GEMMA_3_1B, {"num_key_value_heads": 3}, "multiple of kv_heads, got 4 and 3"),
        (GEMMA_3_1B, {"head_dim": 7}, "head_dim must be even, got 7"),
        (GEMMA_3_1B, {"rms_norm_eps": "small"}, "rms_norm_eps .*'small'"),
        (GEMMA_3_1B, {"layer_types": "SSF"}, "layer_types must be a list, got 'SSF'"),
        (GEMMA_3_1B, {"layer_types": ["full_attention"]}, "name 26 layers.*got 1"),
        (GEMMA_3_1B, {"layer_types": ["chunked_attention"] * 26}, "'chunked_attention'"),
        (GEMMA_3_1B, {"rope_scaling": {"rope_type": "llama3"}}, "rope_type .*'llama3'"),
        (GEMMA_3_1B, {"rope_scaling": {"rope_type": "linear"}}, "factor .*got None"),
        (GEMMA_3_1B, {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial.*0.5"),
        (GEMMA_3_1B, {"eos_token_id": ["</s>"]}, "eos_token_id .*'</s>'"),
        (GEMMA_3_1B, {"final_logit_softcapping": -1.0}, "final_logit_softcapping .*-1.0"),
        (GEMMA_3_4B, {"text_config": None}, "text_config must be an object, got None"),
        (GPT_OSS_20B, {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "fp8"}}, "quant_method .*'fp8'"),
        (GPT_OSS_20B, {"num_experts_per_tok": 33}, "1 .. num_experts=32, got 33"),
        (
            GPT_OSS_20B,
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1.0}},
            "mscale is not supported",
        ),
    ],
)
def test_what_the_decoder_does_not_have_is_refused(base, change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**base, **change})


@pytest.mark.parametrize("name", PUBLISHED)
def test_writing_and_reading_gives_the_same(name):
    config = config_from_hf(PUBLISHED[name])
    assert config_from_hf(config_to_hf(config)) == config
    few = replace(config, eos_token_ids=(), final_softcap=None)
    assert config_from_hf(config_to_hf(few)) == few


@pytest.mark.parametrize(
    "config",
    [
        replace(server.GEMMA, sinks=True),
        replace(server.GEMMA, attention_scale=0.3),
        replace(server.GPT_OSS, swa_rope=Rope(10.0)),
        replace(server.GPT_OSS, final_softcap=3.0),
    ],
)
def test_what_a_config_json_cannot_say_is_not_written(config):
    with pytest.raises(ValueError, match="cannot describe"):
        config_to_hf(config)
