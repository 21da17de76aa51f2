"""What the engine counts, and its Prometheus text."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from swa_jax.http.device import View
from swa_jax.serving.queue import RUNNING, WAITING
from swa_jax.serving.requests import FINISH_REASONS

MOST_COUNTED = 2**30
POOLS = ("full", "swa")

# Counters that come from the loop: what it is called there, here, and what it is.
_LOOP = (
    ("generated", "generated_tokens", "Tokens generated, those past a stop string included."),
    ("prefilled", "prefilled_tokens", "Prompt tokens computed, again after a retraction."),
    ("cached", "prefix_cache_hit_tokens", "Tokens found in the prefix cache."),
    ("retracted", "retractions", "Requests sent back to the queue for want of memory."),
    ("recomputed", "retracted_tokens", "Tokens whose KV a retraction gave up."),
    ("drafted", "draft_tokens", "Tokens speculated on."),
    ("accepted", "accepted_draft_tokens", "Of them those that were right."),
    ("evicted_full", "evicted_full_pages", "Full pages that the prefix cache gave up."),
    ("evicted_swa", "evicted_swa_pages", "SWA pages that the prefix cache gave up."),
    ("refused", "refused_grants", "Grants refused by the allocator: none, if all is right."),
    ("steps", "steps", "Steps of the loop."),
)
LOOP_COUNTERS = tuple(name for name, _, _ in _LOOP)


def _zeros(*names: str) -> Counter[str]:
    return Counter(dict.fromkeys(names, 0))


@dataclass
class Figures:
    """Written by the engine's thread; a reader may see some a moment older than others."""

    finished: Counter[str] = field(default_factory=lambda: _zeros(*FINISH_REASONS[1:]))
    refused: Counter[str] = field(default_factory=lambda: _zeros("queue_full", "stopping"))
    prompt_tokens: int = 0
    running: int = 0
    waiting: int = 0
    places: int = 0
    faults: int = 0
    loop: Counter[str] = field(default_factory=lambda: _zeros(*LOOP_COUNTERS))
    held_pages: Counter[str] = field(default_factory=lambda: _zeros(*POOLS))
    free_pages: Counter[str] = field(default_factory=lambda: _zeros(*POOLS))
    first_token: "Seconds" = field(default_factory=lambda: Seconds())
    request: "Seconds" = field(default_factory=lambda: Seconds())


@dataclass
class Seconds:
    """How long something took, summed up."""

    total: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """Counts one more."""
        self.total, self.count = self.total + seconds, self.count + 1


class LoopCounts:
    """Adds what the loop has counted to the figures.

    The loop counts in int32, which a server that runs for weeks would overrun.

    Args:
      figures: added to.
    """

    def __init__(self, figures: Figures) -> None:
        """Nothing has been seen yet."""
        self._figures = figures
        self._seen: Counter[str] = Counter()

    def add(self, view: View) -> bool:
        """Takes a look into account; True: the loop should count from nothing again."""
        figures = self._figures
        for name in LOOP_COUNTERS:
            now = int(getattr(view.stats, name))
            figures.loop[name] += now - self._seen[name]
            self._seen[name] = now
        figures.running = int(np.sum(view.status == RUNNING))
        figures.waiting = int(np.sum(view.status == WAITING))
        figures.faults = int(view.faults)
        for pool, held, free in zip(POOLS, view.held, view.free, strict=True):
            figures.held_pages[pool], figures.free_pages[pool] = int(held), int(free)
        if max(self._seen.values()) <= MOST_COUNTED:
            return False
        self._seen.clear()
        return True


def as_prometheus(figures: Figures) -> str:
    """The text format 0.0.4 of Prometheus."""
    shown = [
        _labelled("requests_total", "counter", "Requests that ended.", "reason", figures.finished),
        _labelled(
            "refused_requests_total", "counter", "Requests not taken.", "reason", figures.refused
        ),
        _number("prompt_tokens_total", "counter", "Tokens of prompts.", figures.prompt_tokens),
        _number("requests_running", "gauge", "Requests that run.", figures.running),
        _number("requests_waiting", "gauge", "Requests that wait to run.", figures.waiting),
        _number("request_places", "gauge", "Requests known at once at most.", figures.places),
        _number("allocator_faults", "gauge", "Misuses that were refused.", figures.faults),
        _labelled("pages_held", "gauge", "KV pages in use or cached.", "pool", figures.held_pages),
        _labelled("pages_free", "gauge", "KV pages that are free.", "pool", figures.free_pages),
        _summary("time_to_first_token_seconds", "From arrival to a token.", figures.first_token),
        _summary("request_seconds", "From arrival to the end.", figures.request),
    ]
    shown += [
        _number(f"{name}_total", "counter", text, figures.loop[key]) for key, name, text in _LOOP
    ]
    return "".join(shown)


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP swa_jax_{name} {text}\n# TYPE swa_jax_{name} {kind}\n"


def _number(name: str, kind: str, text: str, number: int) -> str:
    return f"{_head(name, kind, text)}swa_jax_{name} {number}\n"


def _labelled(name: str, kind: str, text: str, label: str, numbers: Counter[str]) -> str:
    lines = [f'swa_jax_{name}{{{label}="{key}"}} {number}\n' for key, number in numbers.items()]
    return _head(name, kind, text) + "".join(lines)


def _summary(name: str, text: str, seconds: Seconds) -> str:
    sums = f"swa_jax_{name}_sum {seconds.total:.6f}\nswa_jax_{name}_count {seconds.count}\n"
    return _head(name, "summary", text) + sums
