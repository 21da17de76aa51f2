"""What the KV cache of one model looks like: layers of each kind, heads, window."""

import dataclasses

FULL, SWA = "F", "S"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The KV memory of one model, as its publisher describes it.

    Args:
      name: the name that `get_model` knows it by.
      num_layers: attention layers in all.
      num_full_layers: layers that keep the KV of every token.
      num_swa_layers: layers that keep only a window.
      kv_heads: key/value heads of a full layer, and of an SWA layer unless `swa_kv_heads` differs.
      head_dim: size of one head, likewise.
      sliding_window: W as published; the chunk length where `chunked`.
      chunked: a token sees its own chunk of W tokens instead of the last W.
      window_includes_query: W counts the token itself, so W - 1 past tokens are seen.
      kv_bytes_per_element: 2 for bfloat16; `dataclasses.replace` it for an 8-bit cache.
      swa_kv_heads: key/value heads of an SWA layer where they differ from `kv_heads`.
      swa_head_dim: head size of an SWA layer where it differs from `head_dim`.
      num_shared_layers: layers that read another layer's KV and keep none of their own.
      layer_pattern: kinds of the first layers, F or S, repeated over the model.
      max_context: longest context that the sources state, None where they state none.
      source: where the figures come from.
      also: further sources: context length, or the code of the mask.
      window_note: how this family counts W, and what follows.
    """

    name: str
    num_layers: int
    num_full_layers: int
    num_swa_layers: int
    kv_heads: int
    head_dim: int
    sliding_window: int
    chunked: bool = False
    window_includes_query: bool = True
    kv_bytes_per_element: int = 2
    swa_kv_heads: int | None = None
    swa_head_dim: int | None = None
    num_shared_layers: int = 0
    layer_pattern: str = ""
    max_context: int | None = None
    source: str = ""
    also: tuple[str, ...] = ()
    window_note: str = ""

    def __post_init__(self) -> None:
        kept = self.num_full_layers + self.num_swa_layers
        if kept + self.num_shared_layers != self.num_layers:
            raise ValueError(
                f"{self.name}: full + SWA + shared layers must add up to num_layers="
                f"{self.num_layers}, got {self.num_full_layers} + {self.num_swa_layers} + "
                f"{self.num_shared_layers}"
            )
        least = {"num_full_layers": 0, "num_swa_layers": 1, "num_shared_layers": 0}
        least |= dict.fromkeys(("kv_heads", "head_dim", "sliding_window"), 1)
        least |= {"kv_bytes_per_element": 1}
        for field, low in least.items():
            if getattr(self, field) < low:
                raise ValueError(
                    f"{self.name}: {field} must be at least {low}, got {getattr(self, field)}"
                )
        if self.layer_pattern and self._pattern_counts() != (
            self.num_full_layers,
            self.num_swa_layers,
        ):
            raise ValueError(
                f"{self.name}: layer_pattern {self.layer_pattern!r} gives (full, SWA) layers "
                f"{self._pattern_counts()}, got {(self.num_full_layers, self.num_swa_layers)}"
            )

    def _pattern_counts(self) -> tuple[int, int]:
        kinds = repeat_pattern(self.layer_pattern, self.num_layers - self.num_shared_layers)
        return kinds.count(FULL), kinds.count(SWA)

    @property
    def pure_swa(self) -> bool:
        """No layer keeps everything: the model needs one pool only."""
        return self.num_full_layers == 0

    @property
    def past_window(self) -> int:
        """Past tokens that the next token's SWA layers read at most; the chunk length if chunked.

        The allocator's W counts past tokens, so this is the least W that is right; the published
        `sliding_window` is right too and keeps one token more where it includes the query.
        """
        if self.chunked or not self.window_includes_query:
            return self.sliding_window
        return max(1, self.sliding_window - 1)

    @property
    def full_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all full layers."""
        return self.num_full_layers * self._layer_bytes(self.kv_heads, self.head_dim)

    @property
    def swa_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all SWA layers."""
        heads = self.kv_heads if self.swa_kv_heads is None else self.swa_kv_heads
        head_dim = self.head_dim if self.swa_head_dim is None else self.swa_head_dim
        return self.num_swa_layers * self._layer_bytes(heads, head_dim)

    @property
    def full_only_bytes_per_token(self) -> int:
        """Bytes of one token where every layer keeps everything, as without an SWA pool."""
        return self.full_bytes_per_token + self.swa_bytes_per_token

    def _layer_bytes(self, heads: int, head_dim: int) -> int:
        return 2 * heads * head_dim * self.kv_bytes_per_element  # 2: K and V


def repeat_pattern(pattern: str, num_layers: int) -> str:
    """The kinds of `num_layers` layers: the pattern over and over, cut where the model ends."""
    if not pattern or set(pattern) - {FULL, SWA}:
        raise ValueError(f"a layer pattern is made of F and S, such as 'SSSSSF', got {pattern!r}")
    return (pattern * (num_layers // len(pattern) + 1))[:num_layers]
