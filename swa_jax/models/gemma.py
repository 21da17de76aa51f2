"""The Gemma family. Figures from Google's own model definitions."""

from swa_jax.models.model_config import FULL, SWA, ModelConfig, repeat_pattern

_GEMMA = (
    "https://github.com/google-deepmind/gemma/blob/"
    "7691fd4e7f26c9ec5db38110dddb3addfab4d767/gemma/gm/nn/"
)
_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/main/src/transformers/models/"
_GEMMA_PYTORCH = (
    "https://github.com/google/gemma_pytorch/blob/"
    "014acb7ac4563a5f77c76d7ff98f31b568c16508/gemma/config.py"
)

_NOTE = (
    "W includes the query: the mask keeps key positions above query - W, so W - 1 past tokens "
    "and the token itself."
)


def _gemma(
    name: str,
    pattern: str,
    num_layers: int,
    *,
    heads: int,
    head_dim: int,
    window: int,
    source: str,
    mask: str,
    context: tuple[int, str] | None,
    swa_heads: int | None = None,
    swa_head_dim: int | None = None,
    shared: int = 0,
    note: str = "",
) -> ModelConfig:
    kinds = repeat_pattern(pattern, num_layers - shared)
    return ModelConfig(
        name=name,
        num_layers=num_layers,
        num_full_layers=kinds.count(FULL),
        num_swa_layers=kinds.count(SWA),
        num_shared_layers=shared,
        kv_heads=heads,
        head_dim=head_dim,
        swa_kv_heads=swa_heads,
        swa_head_dim=swa_head_dim,
        sliding_window=window,
        layer_pattern=pattern,
        max_context=context[0] if context else None,
        source=_GEMMA + source,
        also=(_GEMMA + mask, *((context[1],) if context else ())),
        window_note=f"{_NOTE} {note}".strip(),
    )


def _gemma_2(name: str, num_layers: int, heads: int, head_dim: int) -> ModelConfig:
    """Local and global layers take turns, local first."""
    return _gemma(
        name,
        "SF",
        num_layers,
        heads=heads,
        head_dim=head_dim,
        window=4096,
        source="_gemma.py",
        mask="_modules.py",
        context=(8192, _TRANSFORMERS + "gemma2/configuration_gemma2.py"),
    )


def _gemma_3(
    name: str,
    num_layers: int,
    heads: int,
    head_dim: int,
    window: int,
    context: tuple[int, str] | None,
) -> ModelConfig:
    """Five local layers, then a global one: layer i is global where i % 6 == 5."""
    return _gemma(
        name,
        "SSSSSF",
        num_layers,
        heads=heads,
        head_dim=head_dim,
        window=window,
        source="_gemma.py",
        mask="_modules.py",
        context=context,
    )


def _gemma_4(
    name: str,
    pattern: str,
    num_layers: int,
    *,
    heads: int,
    swa_heads: int,
    window: int,
    context: int,
    shared: int = 0,
    note: str = "",
) -> ModelConfig:
    """Global layers have heads of 512, local ones of 256."""
    return _gemma(
        name,
        pattern,
        num_layers,
        heads=heads,
        head_dim=512,
        swa_heads=swa_heads,
        swa_head_dim=256,
        window=window,
        shared=shared,
        source="gemma4/_gemma4.py",
        mask="gemma4/_modules.py",
        context=(context, _TRANSFORMERS + "gemma4/convert_gemma4_weights.py"),
        note=note,
    )


_SHARED_NOTE = "The last layers read the KV of earlier ones and keep none."
_K_EQ_V_NOTE = (
    "Global layers share the projection of K and V, but norm and rotation differ, so both are kept."
)
_GEMMA_3_CONTEXT = _TRANSFORMERS + "gemma3/configuration_gemma3.py"

GEMMA_MODELS = (
    _gemma_2("gemma-2-2b", 26, 4, 256),
    _gemma_2("gemma-2-9b", 42, 8, 256),
    _gemma_2("gemma-2-27b", 46, 16, 128),
    _gemma_3("gemma-3-270m", 18, 1, 256, 512, None),
    _gemma_3("gemma-3-1b", 26, 1, 256, 512, (32_768, _GEMMA_PYTORCH)),
    _gemma_3("gemma-3-4b", 34, 4, 256, 1024, (131_072, _GEMMA_3_CONTEXT)),
    _gemma_3("gemma-3-12b", 48, 8, 256, 1024, (131_072, _GEMMA_PYTORCH)),
    _gemma_3("gemma-3-27b", 62, 16, 128, 1024, (131_072, _GEMMA_PYTORCH)),
    _gemma_4(
        "gemma-4-e2b",
        "SSSSF",
        35,
        heads=1,
        swa_heads=1,
        window=512,
        context=131_072,
        shared=20,
        note=_SHARED_NOTE,
    ),
    _gemma_4(
        "gemma-4-e4b",
        "SSSSSF",
        42,
        heads=2,
        swa_heads=2,
        window=512,
        context=131_072,
        shared=18,
        note=_SHARED_NOTE,
    ),
    _gemma_4(
        "gemma-4-26b-a4b",
        "SSSSSF",
        30,
        heads=2,
        swa_heads=8,
        window=1024,
        context=262_144,
        note=_K_EQ_V_NOTE,
    ),
    _gemma_4(
        "gemma-4-31b",
        "SSSSSF",
        60,
        heads=4,
        swa_heads=16,
        window=1024,
        context=262_144,
        note=_K_EQ_V_NOTE,
    ),
)
