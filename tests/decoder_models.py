"""Tiny random checkpoints made by transformers, and what its models answer."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers

GEMMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GPT_OSS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "max_position_embeddings": 256,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}


def gemma(**changes):
    """A Gemma3ForCausalLM with random weights."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**{**GEMMA, **changes})
    return _randomised(transformers.Gemma3ForCausalLM._from_config(config, **_EAGER))


def gemma_with_vision(**changes):
    """A Gemma3ForConditionalGeneration with random weights."""
    torch.manual_seed(0)
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config={**GEMMA, **changes}, vision_config=vision, mm_tokens_per_image=4
    )
    return _randomised(transformers.Gemma3ForConditionalGeneration._from_config(config, **_EAGER))


def gpt_oss(**changes):
    """A GptOssForCausalLM with random weights."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**{**GPT_OSS, **changes})
    return _randomised(transformers.GptOssForCausalLM._from_config(config, **_EAGER))


_EAGER = {"attn_implementation": "eager"}


def _randomised(model):
    """Numbers large enough that every part of the model shows in its logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            large = weight.ndim == 1 or "bias" in name
            scale = 0.3 if large else weight.shape[-1] ** -0.5
            # What transformers starts norms from (0 or 1) stays their middle.
            middle = weight if name.endswith("norm.weight") else torch.zeros_like(weight)
            weight.copy_(middle + scale * torch.randn_like(weight))
    return model.eval()


def logits_of(model, tokens, **options):
    """float32[B, T, V] that transformers gives for int[B, T] tokens."""
    with torch.no_grad():
        answer = model(input_ids=torch.tensor(np.asarray(tokens)), use_cache=False, **options)
    return answer.logits.float().numpy()
