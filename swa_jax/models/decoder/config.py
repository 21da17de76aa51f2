"""What a decoder computes, known before tracing."""

import dataclasses

from swa_jax.models.decoder.rope import Rope
from swa_jax.models.model_config import FULL, SWA
from swa_jax.replay.trace_lines import show

GEMMA_3, GPT_OSS = "gemma3", "gpt_oss"
FAMILIES = (GEMMA_3, GPT_OSS)
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_heads",
    "kv_heads",
    "head_dim",
    "intermediate_size",
    "sliding_window",
    "max_context",
    "attention_scale",
    "embed_scale",
    "norm_eps",
    "swiglu_limit",
    "swiglu_alpha",
)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder of the Gemma 3 or gpt-oss family. Hashable: it is static under `jit`.

    The family decides what no number says: Gemma 3 scales a norm by 1 + weight and norms what
    attention and MLP give before it is added; gpt-oss scales by the weight and does not.

    Args:
      family: "gemma3" or "gpt_oss".
      vocab_size: V, rows of the embedding.
      hidden_size: H.
      num_heads: query heads of a layer.
      kv_heads: key/value heads of a layer, a divisor of `num_heads`.
      head_dim: D, size of one head, even.
      intermediate_size: I, width of the MLP, or of one expert.
      layer_kinds: "F" (full) or "S" (SWA) for each layer in order.
      sliding_window: as published: the tokens that an SWA layer sees, the query included, so a
        query at position p sees keys at positions above p - sliding_window. Both families count
        so: `sliding_window_overlay` in transformers' masking_utils.py (key > query - window), and
        the publishers' own code that `get_model("gemma-3-4b")` and `get_model("gpt-oss-20b")`
        name under `also`.
      full_rope: rotary embedding of full layers.
      swa_rope: rotary embedding of SWA layers.
      attention_scale: what query-key products are multiplied by.
      max_context: most tokens the model was made for.
      attn_softcap: c, products become c * tanh(product / c); None: left as they are, as in every
        published Gemma 3. Transformers' Gemma 3 reads a value and does not apply it.
      final_softcap: the same for logits.
      norm_eps: added to the mean square in every norm.
      sinks: each query head has a learned number that takes part in the softmax and has no value.
      attention_bias: the four projections of attention add a bias.
      qk_norm: queries and keys are normed head by head before they are turned.
      tie_embeddings: the embedding also gives the logits.
      embed_scale: what embedded tokens are multiplied by.
      activation: of the MLP, a name as transformers has it. Experts always use their own.
      num_experts: E, experts of a layer; 0: one dense MLP.
      experts_per_token: k, experts that a token is sent to.
      swiglu_limit: experts clamp their gate from above and their input to both sides by this.
      swiglu_alpha: factor in the experts' sigmoid.
      eos_token_ids: tokens that end a text.

    Raises:
      ValueError: a value that cannot work, with what would.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    layer_kinds: str
    sliding_window: int
    full_rope: Rope
    swa_rope: Rope
    attention_scale: float
    max_context: int
    attn_softcap: float | None = None
    final_softcap: float | None = None
    norm_eps: float = 1e-6
    sinks: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    activation: str = "gelu_pytorch_tanh"
    num_experts: int = 0
    experts_per_token: int = 0
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _one_of("family", self.family, FAMILIES)
        _one_of("activation", self.activation, ACTIVATIONS)
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        for name in ("attn_softcap", "final_softcap"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive or None, got {getattr(self, name)!r}")
        if not self.layer_kinds or set(self.layer_kinds) - {FULL, SWA}:
            raise ValueError(f"layer_kinds must be made of F and S, got {self.layer_kinds!r}")
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of kv_heads, got {self.num_heads} and "
                f"{self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token must be 1 .. num_experts={self.num_experts}, got "
                f"{self.experts_per_token}"
            )

    @property
    def num_layers(self) -> int:
        """Layers in all."""
        return len(self.layer_kinds)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Places of the full layers, counted from 0."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == FULL)

    @property
    def swa_layers(self) -> tuple[int, ...]:
        """Places of the SWA layers, counted from 0."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == SWA)

    @property
    def past_window(self) -> int:
        """W as the allocator counts it: past tokens that the next token's SWA layers read.

        At least 1, the smallest window that `swa_jax.PoolConfig` takes.
        """
        return max(1, self.sliding_window - 1)

    @property
    def norm_offset(self) -> float:
        """What is added to a norm's weight before it scales."""
        return 1.0 if self.family == GEMMA_3 else 0.0

    @property
    def norms_outputs(self) -> bool:
        """Attention and MLP are normed once more before they are added."""
        return self.family == GEMMA_3

    def rope(self, kind: str) -> Rope:
        """The rotary embedding of the layers of a kind, "F" or "S"."""
        return self.full_rope if kind == FULL else self.swa_rope

    def window(self, kind: str) -> int | None:
        """Tokens that a layer of a kind sees, the query included; None: all."""
        return None if kind == FULL else self.sliding_window


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {known}, got {show(value)}")
