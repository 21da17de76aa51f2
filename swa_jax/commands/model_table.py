"""The known models as tables for the terminal."""

from urllib.parse import urlsplit

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from swa_jax.models import MODELS, ModelConfig


def models_table() -> Table:
    """One row for each model: layers, window, bytes of a token, source."""
    table = Table(title="Known models", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.caption_justify = "left"
    table.caption = "full + SWA layers; KiB of K and V of one token in them, at 2 bytes an element"
    table.add_column("model", no_wrap=True)
    for heading in ("layers", "window", "KiB/token"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for model in MODELS.values():
        table.add_row(
            model.name,
            f"{model.num_full_layers}+{model.num_swa_layers}",
            f"{'chunk ' if model.chunked else ''}{model.sliding_window:,}",
            f"{_kib(model.full_bytes_per_token)}+{_kib(model.swa_bytes_per_token)}",
            Text(_short(model.source), style=f"link {model.source}"),
        )
    return table


def model_table(model: ModelConfig) -> Table:
    """All that is known about one model, with its sources in full."""
    table = Table(title=model.name, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _facts(model):
        table.add_row(label, Text(text))
    return table


def _facts(model: ModelConfig) -> list[tuple[str, str]]:
    shared = f", {model.num_shared_layers} without KV" if model.num_shared_layers else ""
    kind = "chunks of" if model.chunked else "sliding,"
    context = "not stated" if model.max_context is None else f"{model.max_context:,} tokens"
    return [
        ("layers", f"{model.num_full_layers} full, {model.num_swa_layers} SWA{shared}"),
        ("pattern", model.layer_pattern),
        ("window", f"{kind} {model.sliding_window:,} tokens"),
        ("counting", model.window_note),
        ("KV of a token, full", f"{model.full_bytes_per_token:,} bytes"),
        ("KV of a token, SWA", f"{model.swa_bytes_per_token:,} bytes"),
        ("context", context),
        *(("source", url) for url in (model.source, *model.also)),
    ]


def _kib(amount: int) -> str:
    return f"{amount / 1024:g}"


def _short(url: str) -> str:
    """owner/repository of a source on GitHub, otherwise host and path."""
    parts = urlsplit(url)
    if parts.netloc == "github.com":
        return "/".join(parts.path.split("/")[1:3])
    return parts.netloc + parts.path
