"""From a trace, a model and chips to the best split of their KV memory."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.models import ModelConfig, format_bytes, plan_pools
from swa_jax.planner.limits import PLENTY, Limits, stack_limits, two_pools
from swa_jax.planner.loads import Load, deal, same_for_all
from swa_jax.planner.simulate import Figures, SimShape, simulate
from swa_jax.planner.splits import (
    Outcome,
    PageBytes,
    Split,
    around,
    best_of,
    bounds,
    is_enough,
    split_with,
    spread,
)
from swa_jax.replay.driver import final_lengths
from swa_jax.replay.trace import Trace

ROWS_AT_ONCE = 2**15  # of all servers that are simulated while splits are compared
MAX_REQUESTS = 2**24  # over all ranks, after copies
MAX_RANKS = 2**16


@dataclass(frozen=True)
class PlanSettings:
    """What serves the trace, and how."""

    hbm_bytes: int  # memory of one chip
    chips: int = 1
    dp: int = 1  # ranks, each of chips / dp chips that share a model
    weights_bytes: int = 0  # of the whole model; each chip of a rank holds a part
    page_size: int = 16
    max_running: int = 256  # requests at once on one rank
    chunk_tokens: int = 8192  # prompt tokens of a step, on one rank
    max_context: int | None = None
    copies: int = 1  # of the trace
    step_ms: float | None = None  # None: as fast as memory allows, nobody is waited for
    rate: float | None = None  # requests a second over all ranks; None: as in the trace
    deal: str = "round-robin"
    candidates: int = 32  # splits tried at once, in two rounds

    def __post_init__(self) -> None:
        least = ("hbm_bytes", "chips", "dp", "page_size", "max_running", "chunk_tokens", "copies")
        for name in least:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (*least, "weights_bytes", "candidates"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int):
                raise ValueError(f"{name} must be a whole number, got {number!r}")
        if self.weights_bytes < 0:
            raise ValueError(f"weights_bytes must be 0 or more, got {self.weights_bytes}")
        for name in ("step_ms", "rate", "max_context"):
            number = getattr(self, name)
            if number is not None and not 0 < number < float("inf"):
                raise ValueError(f"{name} must be above 0, or None, got {number!r}")
        if self.dp > MAX_RANKS:
            raise ValueError(
                f"--dp must be at most {MAX_RANKS:,}: all ranks are simulated side by side, got "
                f"{self.dp:,}"
            )
        if self.candidates < 3:
            raise ValueError(f"candidates must be at least 3, got {self.candidates}")
        if self.chips % self.dp:
            near = max(self.chips // self.dp, 1)
            raise ValueError(
                f"--chips must be a multiple of --dp, so that every rank has as many; got "
                f"{self.chips} chips for {self.dp} ranks (try --chips {near * self.dp})"
            )
        if self.rate is not None and self.step_ms is None:
            raise ValueError(
                f"--rate {self.rate:g} needs --step-ms, the time of a step: a simulation by "
                "counts has no clock of its own"
            )
        if self.chip_bytes < 1:
            each = -(-self.weights_bytes // self.tp)
            raise ValueError(
                f"--weights leave nothing for KV: {format_bytes(each)} on each of {self.tp} chips "
                f"that have {format_bytes(self.hbm_bytes)} (more --chips for each of --dp "
                "ranks hold less of the model each)"
            )

    @property
    def tp(self) -> int:
        """Chips that share a model."""
        return self.chips // self.dp

    @property
    def chip_bytes(self) -> int:
        """Bytes for KV on one chip."""
        return self.hbm_bytes - -(-self.weights_bytes // self.tp)


@dataclass(frozen=True, eq=False)
class Plan:
    """The best split, and what it came to."""

    trace: Trace
    model: ModelConfig
    chip_model: ModelConfig  # one chip's part of it
    settings: PlanSettings
    page: PageBytes
    split: Split
    rule: Split  # what `plan_pools` gives without a simulation
    outcomes: list[Outcome]  # of every split that was tried, by SWA pages
    best: Outcome
    rule_outcome: Outcome | None  # None: the longest request does not fit it
    sampled: int  # ranks on which splits were compared
    requests: int  # that were asked for, copies included
    rejected: dict[str, int]  # by reason, copies included
    ranks: Figures  # of every rank with the best split
    rank_of: np.ndarray  # int32[M] where each accepted request went
    accepted: np.ndarray  # int64[M] which of the trace it is

    @property
    def pure(self) -> bool:
        """There is one pool."""
        return self.model.pure_swa


def chip_part(model: ModelConfig, tp: int) -> ModelConfig:
    """What one of `tp` chips keeps: heads are divided, and a head that is left over is kept too."""
    swa_heads = model.kv_heads if model.swa_kv_heads is None else model.swa_kv_heads
    return dataclasses.replace(
        model, kv_heads=-(-model.kv_heads // tp), swa_kv_heads=-(-swa_heads // tp)
    )


def plan_split(
    trace: Trace,
    model: ModelConfig,
    settings: PlanSettings,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Finds the split by simulating many at once, then simulates every rank with it.

    Splits are compared on a few of the ranks where there are many.

    Args:
      trace: the requests.
      model: whose KV they leave.
      settings: what serves them.
      on_progress: called with what is being done, requests that are completed, and how many.

    Raises:
      ValueError: settings that cannot work, or no request that fits.
    """
    part = chip_part(model, settings.tp)
    budget, size = settings.chip_bytes, settings.page_size
    page = PageBytes.of(part, size)
    try:
        sizes = plan_pools(
            part, budget, size, max_running=settings.max_running, chunk_tokens=settings.chunk_tokens
        )
    except ValueError as error:
        raise ValueError(f"--hbm {format_bytes(settings.hbm_bytes)} a chip: {error}") from None
    rule = Split(PLENTY if part.pure_swa else sizes.full_tokens // size, sizes.swa_tokens // size)
    most_full = rule.full_pages
    if not part.pure_swa:
        least = bounds(part, budget, size, 1)[0]
        most_full = split_with(budget, page, size, least).full_pages
    served, rejected = _accept(trace, settings, most_full * size)
    longest = -(-int(final_lengths(trace)[served].max()) // size)
    load, which, rank = _deal(trace, served, settings)
    search = _Search(part, settings, page, rule, load, _rows(settings, load), on_progress)
    best = search.only() if part.pure_swa else search.best(longest)
    # What was simulated is all there is where no rank was left out.
    ranks = search.all_ranks(best.split)
    return Plan(
        trace=trace,
        model=model,
        chip_model=part,
        settings=settings,
        page=page,
        split=best.split,
        rule=rule,
        outcomes=sorted(search.outcomes.values(), key=lambda o: o.split.swa_pages),
        best=best,
        rule_outcome=search.outcomes.get(rule.swa_pages),
        sampled=search.sampled,
        requests=len(trace) * settings.copies,
        rejected=rejected,
        ranks=ranks,
        rank_of=rank,
        accepted=which,
    )


def _accept(
    trace: Trace, settings: PlanSettings, most_tokens: int
) -> tuple[np.ndarray, dict[str, int]]:
    """int64[N] requests of the trace that are served, and how many are not, by reason."""
    finals = final_lengths(trace)
    total = trace.prompt_lens.astype(np.int64) + trace.output_lens
    beyond = np.zeros(len(trace), bool)
    if settings.max_context is not None:
        beyond = total > settings.max_context
    long = ~beyond & (finals > most_tokens)
    reasons = {"longer than max_context": beyond, "longer than any full pool": long}
    which = np.flatnonzero(~(beyond | long))
    if not which.size:
        raise ValueError(
            f"no request of {trace.name} fits: the shortest comes to {int(finals.min()):,} tokens, "
            f"and a full pool has at most {most_tokens:,}; give more memory or a longer "
            "--max-context"
        )
    rejected = {name: int(marks.sum()) * settings.copies for name, marks in reasons.items()}
    return which, {name: count for name, count in rejected.items() if count}


def _copied(
    trace: Trace, which: np.ndarray, copies: int, by_time: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Requests of all copies in the order in which they come, and when each comes.

    Copies begin at different places of the trace and go round, or all servers would be alike.

    Args:
      trace: the requests.
      which: int64[N] those that are served.
      copies: K.
      by_time: they come when the trace says; else one after the other.

    Returns:
      int64[K * N] requests, and float64[K * N] milliseconds, or places in the trace.
    """
    at = trace.arrival_ms[which].astype(np.float64) if by_time else np.arange(len(which)) * 1.0
    span = at[-1] + at[-1] / max(len(which) - 1, 1) + 1
    shifts = np.arange(copies) * (span / copies)
    every = np.mod(at[None, :] + shifts[:, None], span).reshape(-1)
    order = np.argsort(every, kind="stable")
    return np.tile(which, copies)[order], every[order]


def _arrivals(at: np.ndarray, settings: PlanSettings) -> np.ndarray:
    """int64[M] the step in which each can come in; 0 where nobody is waited for."""
    if settings.step_ms is None:
        return np.zeros(len(at), np.int64)
    at_ms = at if settings.rate is None else np.arange(len(at)) * (1000.0 / settings.rate)
    steps = np.ceil(at_ms / settings.step_ms)
    if steps.max(initial=0) >= PLENTY:
        raise ValueError(
            f"the last request arrives {steps.max():.3g} steps after the first, more than 2^30; "
            "give a longer --step-ms or a --limit"
        )
    return steps.astype(np.int64)


def _deal(
    trace: Trace, which: np.ndarray, settings: PlanSettings
) -> tuple[Load, np.ndarray, np.ndarray]:
    """The load of every rank; int64[M] requests of the trace, and int32[M] the rank of each."""
    if len(which) * settings.copies > MAX_REQUESTS:
        raise ValueError(
            f"{len(which) * settings.copies:,} requests are more than the {MAX_REQUESTS:,} that "
            "can be simulated at once; give fewer --copies or a lower --limit"
        )
    by_time = settings.step_ms is not None and settings.rate is None
    which, at = _copied(trace, which, settings.copies, by_time)
    arrivals = _arrivals(at, settings)
    prompts, finals = trace.prompt_lens[which], final_lengths(trace)[which]
    load, rank = deal(prompts, finals, arrivals, settings.dp, settings.deal)
    return load, which, rank


def _rows(settings: PlanSettings, load: Load) -> int:
    return min(settings.max_running, max(1, int(np.max(np.asarray(load.count)))))


class _Search:
    """Simulations of one load with different splits."""

    def __init__(
        self,
        part: ModelConfig,
        settings: PlanSettings,
        page: PageBytes,
        rule: Split,
        load: Load,
        rows: int,
        on_progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.part, self.settings, self.page, self.rule, self.load = part, settings, page, rule, load
        self.shape = SimShape(rows, settings.page_size, part.past_window, part.chunked)
        self.on_progress = on_progress
        self.outcomes: dict[int, Outcome] = {}  # by SWA pages
        self.sampled = min(settings.dp, max(1, ROWS_AT_ONCE // rows // settings.candidates))
        self._figures: dict[int, Figures] = {}  # where all ranks were looked at

    def best(self, longest: int) -> Outcome:
        """Tries splits over the whole range, then more of them around the best."""
        count, budget = self.settings.candidates, self.settings.chip_bytes
        low, high = bounds(self.part, budget, self.settings.page_size, longest)
        tried = spread(low, high, count - 1)
        if self.rule.full_pages >= longest:
            tried = sorted({*tried, self.rule.swa_pages})
        self._try([self._split(pages) for pages in tried], "comparing splits")
        best = best_of(list(self.outcomes.values()))
        more = around(tried, best.split.swa_pages, count)
        if more:
            self._try([self._split(pages) for pages in more], "comparing more of them")
        return best_of(list(self.outcomes.values()))

    def only(self) -> Outcome:
        """There is one pool, and nothing to choose."""
        self._try([self.rule], "simulating")
        return self.outcomes[self.rule.swa_pages]

    def all_ranks(self, split: Split) -> Figures:
        """Every rank with one split."""
        if self.sampled == self.settings.dp:
            return self._figures[split.swa_pages]
        limits = stack_limits([self._limits(split)] * self.settings.dp)
        return simulate(self.shape, limits, self.load, self._told("simulating every rank"))

    def _split(self, swa_pages: int) -> Split:
        if swa_pages == self.rule.swa_pages:
            return self.rule
        size = self.settings.page_size
        return split_with(self.settings.chip_bytes, self.page, size, swa_pages)

    def _limits(self, split: Split) -> Limits:
        tokens = min(split.full_pages, split.swa_pages) * self.settings.page_size
        chunk = min(self.settings.chunk_tokens, tokens)
        return two_pools(split.full_pages, split.swa_pages, chunk, self.page.weight)

    def _told(self, what: str) -> Callable[[int, int], None] | None:
        if self.on_progress is None:
            return None
        told = self.on_progress
        return lambda done, total: told(what, done, total)

    def _try(self, splits: list[Split], what: str) -> None:
        ranks = np.linspace(0, self.settings.dp - 1, self.sampled).astype(np.int32)
        load = jax.tree.map(lambda leaf: leaf[jnp.asarray(ranks)], self.load)
        # As many servers each time, so that there is one program.
        count = 1 if self.part.pure_swa else self.settings.candidates
        padded = (splits + [splits[0]] * count)[: max(count, len(splits))]
        limits = [self._limits(split) for split in padded for _ in ranks]
        figures = simulate(
            self.shape,
            stack_limits(limits),
            same_for_all(load, len(padded)),
            self._told(what),
            lambda done, steps: is_enough(done, steps, self.sampled),
        )
        counts = np.asarray(load.count)
        for place, split in enumerate(splits):
            own = slice(place * self.sampled, (place + 1) * self.sampled)
            mine = Figures(**{name: values[own] for name, values in vars(figures).items()})
            self.outcomes[split.swa_pages] = outcome_of(split, mine, counts, self.part.pure_swa)
            self._figures[split.swa_pages] = mine


def outcome_of(split: Split, figures: Figures, counts: np.ndarray, pure: bool) -> Outcome:
    """Sums the figures of the ranks up, which have int[D] requests each."""
    fullest = figures.peak_swa.max() / split.swa_pages
    if not pure:
        fullest = max(fullest, figures.peak_full.max() / split.full_pages)
    steps = int(figures.steps.sum())
    return Outcome(
        split=split,
        finished=bool((figures.completed == counts).all()),
        steps=steps,
        retracted=int(figures.retracted.sum()),
        recomputed=int(figures.recomputed.sum()),
        running=float(figures.sum_running.sum() / max(steps, 1)),
        peak_running=int(figures.peak_running.max()),
        fullest=float(fullest),
    )
