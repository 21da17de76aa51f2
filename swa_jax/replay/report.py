"""What a replay found: as a dict for JSON, as a table, and in one line."""

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

import swa_jax
from swa_jax.config import PoolConfig
from swa_jax.models import ModelConfig, format_bytes
from swa_jax.replay.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table

    from swa_jax.replay.driver import ReplayResult, ReplaySettings

POLICY_TEXTS = {
    "lru": "lru, the least recently used",
    "lfu": "lfu, the least often matched",
    "fifo": "fifo, the oldest",
    "priority": "priority, all alike here, so the least recently used",
    "cost": "cost, the least compute saved for its bytes, with recency",
}


@dataclass(frozen=True, eq=False)
class Run:
    """A replay that was done: what was replayed on what, and the result."""

    trace: Trace
    model: ModelConfig
    pool: PoolConfig
    settings: "ReplaySettings"
    result: "ReplayResult"


def as_dict(run: Run) -> dict[str, object]:
    """All figures, and what they depend on, ready for JSON."""
    return run.result.to_dict() | {
        "ok": not problems(run),
        "trace": run.trace.name,
        "trace_format": run.trace.source_format,
        "model": run.model.name,
        "page_size": run.pool.page_size,
        "full_tokens": run.pool.full_tokens,
        "swa_tokens": run.pool.swa_tokens,
        "pure_swa": run.pool.pure_swa_pool,
        "sliding_window": run.pool.sliding_window,
        "chunked": run.pool.chunked,
        "max_running": run.settings.max_running,
        "chunk_tokens": run.settings.chunk_tokens,
        "max_context": run.settings.max_context,
        "policy": run.settings.policy if run.result.prefix_cache else None,
        "host_bytes": run.settings.host_bytes,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what the figures come from, the device included."""
    return {
        "swa_jax": swa_jax.__version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def problems(run: Run) -> list[str]:
    """What is wrong; empty if nothing is. A rejected request is nothing wrong."""
    result, found = run.result, []
    lost = result.requests - result.completed - result.rejected
    if lost:
        found.append(f"neither completed nor rejected: {lost}")
    if result.leaked_full_pages or result.leaked_swa_pages:
        pages = f"{result.leaked_full_pages} full and {result.leaked_swa_pages} SWA pages"
        found.append(f"leaked {pages}")
    faults = {kind: count for kind, count in result.faults.items() if count}
    if faults:
        found.append(f"faults: {_listed(faults)}")
    return found


def no_cache_reason(trace: Trace, pool: PoolConfig, settings: "ReplaySettings") -> str | None:
    """Why a replay has no prefix cache; None where it has one."""
    if not settings.prefix_cache:
        return "turned off"
    if trace.hash_ids is None or trace.block_tokens is None:
        return "the trace does not say which prompts are equal"
    if pool.pure_swa_pool:
        return "the model has no full layers, so no page outlives its window"
    return None


def verdict(run: Run) -> str:
    """The outcome in one line."""
    result = run.result
    line = f"{result.completed} of {result.requests} requests completed"
    if result.rejected:
        line += f", {result.rejected} rejected ({_listed(result.rejected_reasons)})"
    found = problems(run)
    if found:
        return f"FAILED: {line}; {'; '.join(found)}"
    gain = _reused(run) if result.prefix_cache else _saving(run)
    return f"{line}, nothing leaked, no faults; {gain}".rstrip("; ")


def _saving(run: Run) -> str:
    used, all_full = run.result.kv_bytes_peak, run.result.kv_bytes_peak_full_only
    if not all_full:
        return ""
    instead = f"{format_bytes(used)} at the peak instead of {format_bytes(all_full)}"
    saved = 100 * (1 - used / all_full)
    if saved < 0.5:
        return f"SWA saved no KV memory ({instead})"
    return f"SWA saved {saved:.0f} % of the KV memory ({instead})"


def _reused(run: Run) -> str:
    """No saving is claimed: a cache fills what memory there is, with SWA or without."""
    result = run.result
    if not result.prompt_tokens:
        return ""
    share = _percent(result.reuse.hit_tokens, result.prompt_tokens)
    peak = f"{format_bytes(result.kv_bytes_peak)} at the peak with what the cache keeps"
    return f"{share} of the prompt tokens came from the prefix cache ({peak})"


def notes(run: Run) -> list[str]:
    """What the reader should know about the input, one line each."""
    limit = run.model.max_context
    if limit is None:
        return []
    total = run.trace.prompt_lens.astype(np.int64) + run.trace.output_lens
    served = run.settings.max_context or int(total.max(initial=0))
    longer = int(((total > limit) & (total <= served)).sum())
    if not longer:
        return []
    them = f"{longer} of {len(run.trace)} requests are longer than the {limit:,} tokens"
    what = f"they are replayed all the same (--max-context {limit} rejects them)"
    return [f"note: {them} of {run.model.name}; {what}"]


def sections(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """All figures by heading, as (label, text)."""
    return [
        ("input", _input_rows(run)),
        ("requests", _request_rows(run)),
        ("prefix cache", _cache_rows(run)),
        ("memory", _memory_rows(run)),
        ("checks", _check_rows(run)),
        ("time", _time_rows(run)),
    ]


def _input_rows(run: Run) -> list[tuple[str, str]]:
    pool, trace = run.pool, run.trace
    name = trace.name if trace.name.isprintable() else repr(trace.name)
    rows = [
        ("trace", f"{name} ({trace.source_format}, {len(trace):,} requests)"),
        ("model", run.model.name),
        ("window", _window(run)),
        ("page", _tokens(pool.page_size)),
    ]
    if not pool.pure_swa_pool:
        rows.append(("full pool", f"{_tokens(pool.full_tokens)}, {pool.full_pages:,} pages"))
    rows.append(("SWA pool", f"{_tokens(pool.swa_tokens)}, {pool.swa_pages:,} pages"))
    rows.append(("KV of the pools", format_bytes(run.result.kv_bytes_pool)))
    return rows


def _window(run: Run) -> str:
    kept = run.pool.sliding_window
    if kept is None:
        return "none"
    if run.pool.chunked:
        return f"chunks of {_tokens(kept)}"
    return f"{_tokens(kept)} before the current one"


def _request_rows(run: Run) -> list[tuple[str, str]]:
    result = run.result
    rows = [("completed", f"{result.completed:,} of {result.requests:,}")]
    rows.append(("rejected", f"{result.rejected:,}"))
    rows += [(f"  {reason}", f"{count:,}") for reason, count in result.rejected_reasons.items()]
    return [
        *rows,
        ("retracted", _times(result.retracted)),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("output tokens", f"{result.output_tokens:,}"),
        ("recomputed tokens", f"{result.recomputed_tokens:,}"),
        ("most running at once", f"{result.peak_running:,} of {run.settings.max_running:,}"),
    ]


def _cache_rows(run: Run) -> list[tuple[str, str]]:
    result, reuse = run.result, run.result.reuse
    if not result.prefix_cache:
        return [("cache", f"none: {no_cache_reason(run.trace, run.pool, run.settings)}")]
    return [
        ("leaves first", POLICY_TEXTS[run.settings.policy]),
        ("hit tokens", _part(reuse.hit_tokens, result.prompt_tokens)),
        ("hit blocks", _part(reuse.hit_blocks, result.prompt_blocks)),
        ("evicted full pages", f"{reuse.evicted_full_pages:,}"),
        ("evicted SWA pages", f"{reuse.evicted_swa_pages:,}"),
        ("cached full pages", f"{reuse.cached_full_pages:,} at the end"),
        ("cached SWA pages", f"{reuse.cached_swa_pages:,} at the end"),
        ("tombstones", f"{reuse.tombstones:,} at the end"),
        *_host_rows(run),
    ]


def _host_rows(run: Run) -> list[tuple[str, str]]:
    result, host = run.result, run.result.host
    if run.settings.host_bytes is None:
        return []
    size = f"{_tokens(host.host_full_tokens)}, SWA of {host.host_swa_tokens:,}"
    return [
        ("host memory", f"{format_bytes(run.settings.host_bytes)}: {size}"),
        ("stored on the host", _tokens(host.host_stored_tokens)),
        ("dropped there", _tokens(host.host_dropped_tokens)),
        ("brought back", _part(host.host_hit_tokens, result.prompt_tokens)),
        ("SWA brought back", _tokens(host.host_swa_hit_tokens)),
    ]


def _memory_rows(run: Run) -> list[tuple[str, str]]:
    result, pool = run.result, run.pool
    rows = [("peak SWA pages", _part(result.peak_swa_pages, pool.swa_pages))]
    if not pool.pure_swa_pool:
        rows.insert(0, ("peak full pages", _part(result.peak_full_pages, pool.full_pages)))
    peak, full_only = format_bytes(result.kv_bytes_peak), result.kv_bytes_peak_full_only
    if result.prefix_cache:  # the two count different things, so the labels say which
        peak += ", with what the cache keeps"
        other = "running, no SWA or reuse"
    else:
        other = "peak KV without SWA"
    return [*rows, ("peak KV", peak), (other, format_bytes(full_only))]


def _check_rows(run: Run) -> list[tuple[str, str]]:
    result = run.result
    faults = {kind: count for kind, count in result.faults.items() if count}
    return [
        ("leaked full pages", f"{result.leaked_full_pages:,}"),
        ("leaked SWA pages", f"{result.leaked_swa_pages:,}"),
        ("faults", _listed(faults) if faults else "none"),
    ]


def _time_rows(run: Run) -> list[tuple[str, str]]:
    result = run.result
    each = f", {1e6 * result.wall_s / result.steps:,.0f} us each" if result.steps else ""
    return [
        ("steps", f"{result.steps:,}{each}"),
        ("run", f"{result.wall_s:.2f} s on {versions()['device']}"),
        ("compilation", f"{result.compile_s:.2f} s"),
    ]


def as_table(run: Run) -> "Table":
    """`sections` for the terminal; needs rich."""
    return table_of(sections(run))


def table_of(parts: list[tuple[str, list[tuple[str, str]]]]) -> "Table":
    """Headings and their rows of (label, text) for the terminal; needs rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, title="Replay", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_column()
    for heading, rows in parts:
        for index, (label, text) in enumerate(rows):
            # Text, not str: a trace's name must not be read as markup.
            table.add_row(heading if index == 0 else "", Text(label), Text(text))
        table.add_section()
    return table


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def _part(part: int, whole: int) -> str:
    share = f" ({_percent(part, whole)})" if whole else ""
    return f"{part:,} of {whole:,}{share}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count:,} times")


def _tokens(count: int) -> str:
    return f"{count:,} token" + ("" if count == 1 else "s")
