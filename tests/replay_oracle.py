"""A plain scheduler to compare the replay loop against: one request, one page at a time.

Every page is an object that its request holds in a list, free pages are in a set, and the queue
is a sorted list. It follows the policy that `swa_jax.replay` documents: each step gives back what
has left a window, ends what is complete, admits the oldest that fits, sends the newest back while
memory is short, then grows every request, and counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from oracle import Sizes

Pages = tuple[int, int]  # of the full and of the SWA pool


class Pool:
    """Pages of one kind."""

    def __init__(self, pages: int) -> None:
        self.size = pages
        self.free = set(range(1, pages + 1))

    def take(self) -> int:
        page = min(self.free)
        self.free.remove(page)
        return page

    def give(self, page: int) -> None:
        assert page not in self.free
        assert 1 <= page <= self.size
        self.free.add(page)

    @property
    def held(self) -> int:
        return self.size - len(self.free)


@dataclasses.dataclass
class Request:
    number: int
    final: int  # tokens it has when it is complete
    target: int  # tokens to prefill, from there on it decodes
    tokens: int = 0
    full: list[int] = dataclasses.field(default_factory=list)
    swa: list[int | None] = dataclasses.field(default_factory=list)  # None: left the window

    @property
    def prefilling(self) -> bool:
        return self.tokens < self.target


@dataclasses.dataclass
class Figures:
    steps: int = 0
    completed: int = 0
    retracted: int = 0
    recomputed: int = 0
    peak_full: int = 0
    peak_swa: int = 0
    peak_all_full: int = 0
    peak_running: int = 0


class Scheduler:
    """Serves requests of `prompts` tokens that end with `finals` tokens of KV.

    Attributes:
      lengths: after each step, the tokens of each request that runs.
      pairs: after each step, the held pages of both pools.
    """

    def __init__(
        self,
        sizes: Sizes,
        max_running: int,
        chunk_tokens: int,
        prompts: Sequence[int],
        finals: Sequence[int],
        rejected: frozenset[int] = frozenset(),
    ) -> None:
        self.sizes, self.max_running, self.chunk_tokens = sizes, max_running, chunk_tokens
        self.swa = Pool(sizes.swa_pages)
        self.full = self.swa if sizes.pure else Pool(sizes.full_pages)
        self.waiting = [
            Request(number, final, prompt)
            for number, (prompt, final) in enumerate(zip(prompts, finals, strict=True))
            if number not in rejected
        ]
        self.running: list[Request] = []  # the oldest first
        self.figures = Figures()
        self.lengths: list[dict[int, int]] = []
        self.pairs: list[Pages] = []

    def pages(self, tokens: int) -> int:
        return (tokens + self.sizes.page_size - 1) // self.sizes.page_size

    @property
    def room(self) -> int:
        """Pages that can be had in both pools."""
        return min(len(self.full.free), len(self.swa.free))

    def run(self, most_steps: int = 10_000) -> Scheduler:
        while self.waiting or self.running:
            assert self.figures.steps < most_steps, "the policy itself does not end"
            self.step()
        return self

    def step(self) -> None:
        for request in self.running:
            self.evict(request)
        for request in [one for one in self.running if one.tokens >= one.final]:
            self.leave(request)
            self.figures.completed += 1
        while self.waiting and len(self.running) < self.max_running and self.fits(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        while len(self.running) > 1 and self.stuck():
            self.retract()
        for request, tokens in self.plan():
            self.extend(request, tokens)
        self.count()

    def first_needed(self, tokens: int) -> int:
        """The first token that the next one's SWA layers read."""
        window = self.sizes.window
        if window is None:
            return 0
        if self.sizes.chunked:
            return tokens // window * window
        return max(0, tokens - window)

    def evict(self, request: Request) -> None:
        needed = self.first_needed(request.tokens)
        for index, page in enumerate(request.swa):
            last_token = (index + 1) * self.sizes.page_size - 1
            if page is not None and last_token < needed:
                self.swa.give(page)
                request.swa[index] = None

    def leave(self, request: Request) -> None:
        for page in request.swa:
            if page is not None:
                self.swa.give(page)
        if not self.sizes.pure:
            for page in request.full:
                self.full.give(page)
        request.swa, request.full, request.tokens = [], [], 0
        self.running.remove(request)

    def most_swa(self, tokens: int) -> int:
        """SWA pages of a request that gives back what has left its window."""
        pages, size, window = self.pages(tokens), self.sizes.page_size, self.sizes.window
        if window is None:
            return pages
        dropped_whole = self.sizes.chunked and window % size == 0
        most = self.pages(window) + (0 if dropped_whole else 1)
        if not self.sizes.pure:
            most = min(most, self.sizes.full_pages)
        return min(pages, most)

    def promised(self) -> Pages:
        """What those in prefill were admitted for and have not taken yet."""
        full = swa = 0
        for request in self.running:
            if request.prefilling:
                live = sum(page is not None for page in request.swa)
                full += self.pages(request.target) - len(request.full)
                swa += max(0, self.most_swa(request.target) - live)
        return full, swa

    def fits(self, request: Request) -> bool:
        """Its own need, beside all promises and a page to grow into for each that runs."""
        if not self.running:
            return True
        full, swa = self.promised()
        spare = len(self.running)
        swa_fits = self.most_swa(request.target) <= len(self.swa.free) - swa - spare
        full_fits = self.pages(request.target) <= len(self.full.free) - full - spare
        return swa_fits and (self.sizes.pure or full_fits)

    def decode_pages(self) -> int:
        size = self.sizes.page_size
        return sum(not one.prefilling and one.tokens % size == 0 for one in self.running)

    def stuck(self) -> bool:
        """The decoding requests cannot all go on, or nobody can do anything."""
        return self.decode_pages() > self.room or not any(tokens for _, tokens in self.plan())

    def retract(self) -> None:
        newest = self.running[-1]
        self.figures.retracted += 1
        self.figures.recomputed += newest.tokens
        newest.target = max(newest.target, newest.tokens)
        self.leave(newest)
        self.waiting.insert(0, newest)
        self.waiting.sort(key=lambda request: request.number)

    def plan(self) -> list[tuple[Request, int]]:
        """A token for each that decodes; one chunk, the oldest first, for those that prefill.

        Where pages run out a chunk is cut short, and nobody behind it gets any.
        """
        pages = max(0, self.room - self.decode_pages())
        chunk, cut = self.chunk_tokens, False
        plan = []
        for request in self.running:
            if not request.prefilling:
                plan.append((request, 1))
                continue
            want = min(chunk, request.target - request.tokens)
            in_last_page = len(request.swa) * self.sizes.page_size - request.tokens
            tokens = 0 if cut else min(want, in_last_page + pages * self.sizes.page_size)
            cut = cut or tokens < want
            pages -= self.pages(request.tokens + tokens) - self.pages(request.tokens)
            chunk -= want
            plan.append((request, tokens))
        return plan

    def extend(self, request: Request, tokens: int) -> None:
        request.tokens += tokens
        while len(request.swa) < self.pages(request.tokens):
            request.swa.append(self.swa.take())
            request.full.append(0 if self.sizes.pure else self.full.take())

    def count(self) -> None:
        figures, held = self.figures, (self.full.held, self.swa.held)
        figures.steps += 1
        figures.peak_full = max(figures.peak_full, held[0])
        figures.peak_swa = max(figures.peak_swa, held[1])
        filled = sum(self.pages(request.tokens) for request in self.running)
        figures.peak_all_full = max(figures.peak_all_full, filled)
        figures.peak_running = max(figures.peak_running, len(self.running))
        self.pairs.append(held)
        self.lengths.append({request.number: request.tokens for request in self.running})
