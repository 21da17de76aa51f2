"""gpt-oss, Llama 4, OLMo 3, Command R7B and Mistral 7B."""

from typing import TypedDict

from swa_jax.models.model_config import FULL, SWA, ModelConfig, repeat_pattern

_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/main/"
_MAXTEXT = (
    "https://github.com/AI-Hypercomputer/maxtext/blob/"
    "e591f30cbbf217ed67ef71263ec0538239f9c3b8/src/maxtext/configs/models/"
)
_GPT_OSS = (
    "https://github.com/openai/gpt-oss/blob/"
    "7b583341fe16729127f6d5b94a7b09ccae97e1a1/gpt_oss/torch/model.py"
)
_TORCHTUNE = (
    "https://github.com/pytorch/torchtune/blob/"
    "bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1/torchtune/models/llama4/_model_builders.py"
)
_LLAMA_MODELS = (
    "https://github.com/meta-llama/llama-models/blob/"
    "a9c89c471f793423afd4cc3ca8671d6e56fe64cb/models/llama4/model.py"
)
_OLMO_CORE = (
    "https://github.com/allenai/OLMo-core/blob/"
    "fa6c5014c9f6e9ee789da2d9c20d5126fee8df0d/src/olmo_core/nn/"
)
_MLX_LM = (
    "https://github.com/ml-explore/mlx-lm/blob/"
    "d78bf58e217c904ec282ed8da9b947491f78c022/mlx_lm/models/cohere2.py"
)
_MISTRAL = (
    "https://github.com/mistralai/mistral-inference/blob/"
    "2557e12d0e1878a1562ece30434820f80aa3e12a/src/mistral_inference/cache.py"
)


class _Layers(TypedDict):
    num_layers: int
    num_full_layers: int
    num_swa_layers: int
    layer_pattern: str


def _layers(pattern: str, num_layers: int) -> _Layers:
    kinds = repeat_pattern(pattern, num_layers)
    return {
        "num_layers": num_layers,
        "num_full_layers": kinds.count(FULL),
        "num_swa_layers": kinds.count(SWA),
        "layer_pattern": pattern,
    }


def _gpt_oss(size: str, num_layers: int) -> ModelConfig:
    return ModelConfig(
        name=f"gpt-oss-{size}",
        **_layers("SF", num_layers),
        kv_heads=8,
        head_dim=64,
        sliding_window=128,
        max_context=131_072,
        source=f"{_MAXTEXT}gpt-oss-{size}.yml",
        also=(_GPT_OSS,),
        window_note=(
            "W includes the query: keys at query - W and below are masked. Even layers slide. The "
            "learned attention sinks are one number a head and take no KV."
        ),
    )


def _llama_4(name: str, maxtext: str, max_context: int) -> ModelConfig:
    return ModelConfig(
        name=name,
        **_layers("SSSF", 48),
        kv_heads=8,
        head_dim=128,
        sliding_window=8192,
        chunked=True,
        max_context=max_context,
        source=_TORCHTUNE,
        also=(_LLAMA_MODELS, f"{_MAXTEXT}{maxtext}.yml"),
        window_note=(
            "Chunked: a token sees its own chunk of 8,192 up to itself, nothing across the border. "
            "Every fourth layer has no position embedding and sees everything. Head size is "
            "5120 / 40 = 128. max_context is that of the instruct model."
        ),
    )


def _olmo_3(size: str, num_layers: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        name=f"olmo-3-{size}",
        **_layers("SSSF", num_layers),
        kv_heads=kv_heads,
        head_dim=128,
        sliding_window=4096,
        max_context=65_536,
        source=f"{_OLMO_CORE}transformer/config.py",
        also=(f"{_OLMO_CORE}attention/__init__.py", f"{_MAXTEXT}olmo3-{size}.yml"),
        window_note="W includes the query: the kernel is given W - 1 tokens to the left.",
    )


_COMMAND_R7B = ModelConfig(
    name="command-r7b",
    **_layers("SSSF", 32),
    kv_heads=8,
    head_dim=128,
    sliding_window=4096,
    max_context=131_072,
    source=_MLX_LM,
    also=(
        f"{_TRANSFORMERS}docs/source/en/model_doc/cohere2.md",
        f"{_TRANSFORMERS}src/transformers/masking_utils.py",
    ),
    window_note="W includes the query: the mask keeps key positions above query - W.",
)

_MISTRAL_7B = ModelConfig(
    name="mistral-7b-v0.1",
    **_layers("S", 32),
    kv_heads=8,
    head_dim=128,
    sliding_window=4096,
    max_context=32_768,
    source="https://arxiv.org/abs/2310.06825",
    also=(
        _MISTRAL,
        f"{_TRANSFORMERS}src/transformers/models/mistral/convert_mistral_weights_to_hf.py",
    ),
    window_note=(
        "Pure SWA: every layer slides, one pool. The paper says that token i sees i - W to i; the "
        "published code keeps W entries with the query's own among them, so W includes the query. "
        "Trained on 8,192 tokens; v0.2 and later have no window."
    ),
)

OTHER_MODELS = (
    _gpt_oss("20b", 24),
    _gpt_oss("120b", 36),
    _llama_4("llama-4-scout", "llama4-17b-16e", 10_485_760),
    _llama_4("llama-4-maverick", "llama4-17b-128e", 1_048_576),
    _olmo_3("7b", 32, 32),
    _olmo_3("32b", 64, 8),
    _COMMAND_R7B,
    _MISTRAL_7B,
)
