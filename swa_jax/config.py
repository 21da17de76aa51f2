"""Static sizes of the two pools. Everything here is known before tracing."""

import dataclasses
import operator

from swa_jax.html_table import html_table
from swa_jax.unified import SizedDecoder, SizedModel, UnifiedLayout, cut_budget, sizes_of

MAX_SLOTS = 2**31 - 1


def _whole_int(name: str, value: object) -> int:
    """Returns `value` as a Python int that may be 0, or says why it is none."""
    if isinstance(value, int) and not isinstance(value, bool) and value == 0:
        return 0
    return _positive_int(name, value)


def _window(value: object) -> int:
    try:
        return _positive_int("sliding_window", value)
    except ValueError as error:
        raise ValueError(f"{error}; None is for models without a window") from None


def _positive_int(name: str, value: object) -> int:
    """Returns `value` as a Python int, or says why it is none."""
    if isinstance(value, bool):
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be a positive integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be a positive integer, got {number}")
    return number


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """Sizes of the full and the SWA pool, in tokens. Hashable: it is static under `jit`.

    Args:
      full_tokens: slots for layers that attend to everything, a positive multiple of the page.
      swa_tokens: slots for sliding-window layers, likewise.
      page_size: tokens in a page, the same in both pools.
      sliding_window: W, the past tokens kept live below the n committed ones (rule of
        `swa_jax.window`). None where nothing ever leaves a window.
      chunked: the window is a chunk of W tokens (Llama 4) instead of a sliding one.
      pure_swa_pool: set by `PoolConfig.pure_swa`; every layer is SWA and there is one pool.
      unified_layout: set by `PoolConfig.unified`; both pools draw from one byte budget. The two
        sizes are then how far page ids go: what can be granted of one pool is what the other has
        not taken.
      ring_tokens: set by `PoolConfig.request_ring`; the SWA side is no pages but a ring of so many
        slots for each request.
      owner_tags: every page carries the id of its owner, and a call by somebody else is refused
        (`swa_jax.owners`). 8 more bytes a full page and 4 an SWA page; off, nothing is kept and
        nothing is compiled.

    Raises:
      ValueError: a size that cannot work, with the size that would.
    """

    full_tokens: int
    swa_tokens: int
    page_size: int = 1
    sliding_window: int | None = None
    chunked: bool = dataclasses.field(default=False, kw_only=True)
    pure_swa_pool: bool = dataclasses.field(default=False, kw_only=True)
    unified_layout: UnifiedLayout | None = dataclasses.field(default=None, kw_only=True)
    ring_tokens: int | None = dataclasses.field(default=None, kw_only=True)
    owner_tags: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        page = _positive_int("page_size", self.page_size)
        object.__setattr__(self, "page_size", page)
        for name in ("full_tokens", "swa_tokens"):
            object.__setattr__(self, name, self._checked_tokens(name, getattr(self, name)))
        if self.pure_swa_pool and self.full_tokens != self.swa_tokens:
            raise ValueError(
                "a pure SWA configuration has one pool: full_tokens must equal swa_tokens, got "
                f"{self.full_tokens} and {self.swa_tokens}; use PoolConfig.pure_swa(tokens)"
            )
        if self.sliding_window is not None:
            window = _window(self.sliding_window)
            if window > MAX_SLOTS:
                raise ValueError(
                    f"sliding_window must be at most 2^31 - 1 tokens, got {window}; "
                    "None is for models without a window"
                )
            object.__setattr__(self, "sliding_window", window)
            if self.unified_layout is None and self.ring_tokens is None:
                self._check_one_window_fits()
        elif self.chunked:
            raise ValueError("chunked=True needs sliding_window, the chunk length in tokens")
        if self.unified_layout is not None:
            self._check_layout(self.unified_layout)
        if self.ring_tokens is not None:
            object.__setattr__(self, "ring_tokens", self._checked_ring(self.ring_tokens))
        if not isinstance(self.owner_tags, bool):
            raise ValueError(f"owner_tags must be True or False, got {self.owner_tags!r}")

    def __repr__(self) -> str:
        """The shortest call that makes it, but for a unified layout, which is written out."""
        if self.pure_swa_pool:
            given = {"tokens": self.swa_tokens}
        else:
            given = {"full_tokens": self.full_tokens, "swa_tokens": self.swa_tokens}
        name = "PoolConfig.pure_swa" if self.pure_swa_pool else "PoolConfig"
        names = {*given, "full_tokens", "swa_tokens", "pure_swa_pool"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in names and (value != field.default or field.name == "page_size"):
                given[field.name] = value
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    def _repr_html_(self) -> str:
        full = ["full", f"{self.full_tokens:,}", f"{self.full_pages:,} pages"]
        unit = "rings" if self.has_rings else "pages"
        rows = [full, ["SWA", f"{self.swa_tokens:,}", f"{self.swa_units:,} {unit}"]]
        notes = [f"page of {self.page_size:,} tokens"]
        if self.has_rings:
            notes.append(f"ring of {self.swa_unit_tokens:,} tokens for each request")
        if self.unified_layout is not None:
            layout = self.unified_layout
            notes.append(f"one budget of {layout.kv_bytes:,} bytes: the sizes are each pool's most")
        if self.sliding_window is not None:
            kind = "chunks" if self.chunked else "window"
            notes.append(f"{kind} of {self.sliding_window:,} tokens")
        if self.owner_tags:
            notes.append("pages carry their owner's id")
        rows = rows[1:] if self.pure_swa_pool else rows
        return html_table("PoolConfig", ["pool", "tokens", "size"], rows, notes)

    def _checked_tokens(self, name: str, value: object) -> int:
        tokens, page = _positive_int(name, value), self.page_size
        # The padding page takes slots too, and the last slot must still be an int32.
        if tokens + page > MAX_SLOTS:
            most = (MAX_SLOTS - page) // page * page
            raise ValueError(
                f"{name} + page_size must be at most 2^31 - 1 slots, got {tokens} + {page}; "
                f"the most for this page is {most}"
            )
        if tokens % page:
            near = max(page, tokens // page * page)
            raise ValueError(
                f"{name} must be a multiple of page_size={page}, got {tokens}; try {near}"
            )
        return tokens

    def _check_one_window_fits(self) -> None:
        """A request at its window's edge holds one page more than the window.

        Public report B49: a pool below that hangs at a page boundary instead of failing at start.
        """
        if self.swa_pages < self.min_swa_pages:
            need = self.min_swa_pages * self.page_size
            raise ValueError(
                f"swa_tokens={self.swa_tokens} cannot hold one window of {self.sliding_window} "
                f"tokens while its next page is filled; need at least {need} tokens "
                f"({self.min_swa_pages} pages of {self.page_size})"
            )

    def _check_layout(self, layout: UnifiedLayout) -> None:
        """The pages are those of the layout's blocks, and one request fits beside its window."""
        page = self.page_size
        tokens = tuple(layout.blocks * n * page for n in (layout.full_pages, layout.swa_pages))
        if self.pure_swa_pool or tokens != (self.full_tokens, self.swa_tokens):
            raise ValueError(
                f"the sizes of pools with one budget follow from its layout, {tokens[0]} full and "
                f"{tokens[1]} SWA tokens; got {self.full_tokens} and {self.swa_tokens}: use "
                "PoolConfig.unified(bytes, model)"
            )
        least = 1 if self.sliding_window is None else self.min_swa_pages
        need = max(2, layout.blocks_for(least, self.window_pages))
        if layout.blocks < need:
            units = layout.padding_units + need * layout.block_units
            raise ValueError(
                f"{layout.blocks} blocks of {layout.block_units * layout.unit_bytes} bytes cannot "
                f"hold one window of {self.sliding_window} tokens in both pools while its next "
                f"page is filled; need at least {units * layout.unit_bytes} bytes ({need} blocks)"
            )

    def _checked_ring(self, value: object) -> int:
        """A ring is whole pages and holds a window and the next token; the rings fill the pool."""
        ring, page = _positive_int("ring_tokens", value), self.page_size
        window = self.sliding_window
        if window is None or self.chunked or self.pure_swa_pool or self.unified_layout is not None:
            raise ValueError(
                "request rings are for a full pool beside a sliding window: they need "
                "sliding_window, and go with neither chunked, a pure SWA pool nor one budget for "
                f"both pools; got {self}"
            )
        if ring % page or ring <= window or self.swa_tokens % ring:
            least = -(-(window + 1) // page) * page
            raise ValueError(
                f"ring_tokens must be a multiple of page_size={page} above the window of {window} "
                f"tokens, {least} or more, and swa_tokens a multiple of it; got a ring of {ring} "
                f"and {self.swa_tokens} SWA tokens: use PoolConfig.request_ring(full_tokens, "
                "requests)"
            )
        return ring

    @classmethod
    def request_ring(
        cls,
        full_tokens: int,
        requests: int,
        *,
        page_size: int = 1,
        sliding_window: int,
        extra_tokens: int = 0,
        owner_tags: bool = False,
    ) -> "PoolConfig":
        """A paged full pool; the SWA side is one fixed ring of slots for each request.

        Position p of a request lives at place p mod the ring. A step that writes t tokens at once
        has from the W tokens before the first of them up to the last one live at the same time, so
        a ring of fewer than W + t places would let a token overwrite one that is still read. It is
        rounded up to whole pages, so that a page of tokens lies in one page of the ring and a
        kernel can read it by pages. See `swa_jax.request_ring`.

        Args:
          full_tokens: slots for layers that attend to everything, a positive multiple of the page.
          requests: rings, which is how many requests can run at once.
          page_size: tokens in a page.
          sliding_window: W, as everywhere: past tokens that stay live below the committed ones.
          extra_tokens: tokens that one step writes beside the first: drafts that are verified, or
            the rest of a chunk of prefill that is written before it is attended to.
          owner_tags: as for `PoolConfig`.

        Raises:
          ValueError: a size that cannot work, with the size that would.
        """
        page, rings = _positive_int("page_size", page_size), _positive_int("requests", requests)
        window = _positive_int("sliding_window", sliding_window)
        extra = _whole_int("extra_tokens", extra_tokens)
        ring = -(-(window + 1 + extra) // page) * page
        if rings * ring + page > MAX_SLOTS:
            raise ValueError(
                f"{rings} rings of {ring} tokens are more than 2^31 - 1 slots; the most for this "
                f"ring is {(MAX_SLOTS - page) // ring} requests"
            )
        sizes = (full_tokens, rings * ring, page, window)
        return cls(*sizes, ring_tokens=ring, owner_tags=owner_tags)

    @classmethod
    def pure_swa(
        cls,
        tokens: int,
        page_size: int = 1,
        sliding_window: int | None = None,
        *,
        chunked: bool = False,
        owner_tags: bool = False,
    ) -> "PoolConfig":
        """One pool of `tokens` slots for a model in which every layer is SWA."""
        sizes = (tokens, tokens, page_size, sliding_window)
        return cls(*sizes, chunked=chunked, pure_swa_pool=True, owner_tags=owner_tags)

    @classmethod
    def unified(
        cls,
        budget: int,
        model: SizedModel | SizedDecoder,
        page_size: int = 1,
        *,
        sliding_window: int | None = None,
        kv_bytes_per_element: int | None = None,
        owner_tags: bool = False,
    ) -> "PoolConfig":
        """Both pools out of one budget: what one does not need, the other may take.

        `swa_jax.rebalance` moves free blocks of pages to the pool that lacks them; a new state has
        about as many pages of either kind. See `swa_jax.unified` for the layout.

        Args:
          budget: bytes for the KV of all layers.
          model: a `ModelConfig` or a `DecoderConfig` with layers of both kinds.
          page_size: tokens in a page.
          sliding_window: W; by default the model's `past_window`.
          kv_bytes_per_element: of the KV as it is stored; by default as the `ModelConfig` says, and
            4 for a `DecoderConfig`, whose KV is float32 by default too.
          owner_tags: as for `PoolConfig`.

        Raises:
          ValueError: a model with layers of one kind, or a budget that cannot hold one window in
            both pools, with the least that can.
        """
        budget, page = _positive_int("budget", budget), _positive_int("page_size", page_size)
        if kv_bytes_per_element is not None:
            kv_bytes_per_element = _positive_int("kv_bytes_per_element", kv_bytes_per_element)
        sizes = sizes_of(model, kv_bytes_per_element)
        layout = cut_budget(budget, page, sizes, MAX_SLOTS - page)
        window = model.past_window if sliding_window is None else sliding_window
        if layout.blocks < 2:
            two = layout.padding_units + 2 * layout.block_units
            raise ValueError(
                f"a budget of {budget} bytes has no two blocks of {layout.block_units} units of "
                f"{layout.unit_bytes} bytes; need at least {two * layout.unit_bytes} bytes"
            )
        return cls(
            layout.blocks * layout.full_pages * page,
            layout.blocks * layout.swa_pages * page,
            page,
            window,
            chunked=getattr(model, "chunked", False),
            unified_layout=layout,
            owner_tags=owner_tags,
        )

    @property
    def apart(self) -> "PoolConfig":
        """The same page ids in two pools of their own, for KV that lies outside the budget."""
        return dataclasses.replace(self, unified_layout=None)

    def most_pages_beside(self, window_pages: int | None) -> int:
        """The most full pages of a request that holds so many SWA pages; None: one for each."""
        if self.unified_layout is None:
            return self.full_pages
        return self.unified_layout.most_full_pages(window_pages)

    @property
    def window_pages(self) -> int | None:
        """SWA pages that one request holds at most; None where nothing leaves a window."""
        return None if self.sliding_window is None else self.min_swa_pages

    @property
    def full_pages(self) -> int:
        """Usable full pages: ids 1 .. full_pages."""
        return self.full_tokens // self.page_size

    @property
    def swa_pages(self) -> int:
        """Usable SWA pages: ids 1 .. swa_pages."""
        return self.swa_tokens // self.page_size

    @property
    def has_rings(self) -> bool:
        """The SWA side is a ring for each request: no page is mapped."""
        return self.ring_tokens is not None

    @property
    def swa_unit_tokens(self) -> int:
        """Tokens in what the SWA pool grants: a page, or a ring."""
        return self.page_size if self.ring_tokens is None else self.ring_tokens

    @property
    def swa_units(self) -> int:
        """Pages or rings that the SWA pool grants: ids 1 .. swa_units."""
        return self.swa_tokens // self.swa_unit_tokens

    def needs_mapping(self, call: str) -> None:
        """Raises ValueError where `call` asks for SWA sides of pages and there are only rings."""
        if self.has_rings:
            raise ValueError(
                f"{call} needs full pages that are mapped to SWA pages: with request rings a "
                "token's SWA slot follows from its request's ring and its position, see "
                "swa_jax.ring_slots"
            )

    @property
    def min_swa_pages(self) -> int:
        """Fewest SWA pages with which one request can decode for ever."""
        if self.sliding_window is None:
            return 1
        if self.ring_tokens is not None:
            return self.ring_tokens // self.page_size
        window_pages = -(-self.sliding_window // self.page_size)
        # A chunk that ends on a page boundary is dropped whole before the next page is taken.
        spare = 0 if self.chunked and self.sliding_window % self.page_size == 0 else 1
        if self.pure_swa_pool:
            return window_pages + spare
        return min(self.full_pages, window_pages + spare)
