"""Loads for the simulation of a server by counts, and the plain scheduler beside it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from oracle import Sizes
from replay_oracle import Scheduler

from swa_jax.planner import Figures, Limits, Load, SimShape, simulate, stack_limits, two_pools
from swa_jax.planner.limits import PLENTY

Request = tuple[int, int]  # tokens of the prompt, and at the end
ROWS, REQUESTS, SERVERS = 4, 12, 8  # of every program, so that a shape compiles once


def limits_of(sizes: Sizes, chunk: int) -> Limits:
    full = PLENTY if sizes.pure else sizes.full_pages
    return two_pools(full, sizes.swa_pages, chunk, (0.5, 0.5))


def load_of(servers: Sequence[Sequence[Request]], arrivals: Sequence[int] = ()) -> Load:
    """The loads of the servers, padded with requests that are not there."""
    table = np.ones((3, len(servers), REQUESTS), np.int32)
    for number, requests in enumerate(servers):
        for place, (prompt, final) in enumerate(requests):
            arrival = arrivals[place] if arrivals else 0
            table[:, number, place] = prompt, final, arrival
    counts = np.array([len(requests) for requests in servers], np.int32)
    prompts, finals, when = (jnp.asarray(part) for part in table)
    return Load(prompts, finals, when, jnp.asarray(counts))


def shape_of(sizes: Sizes) -> SimShape:
    assert sizes.window is not None
    return SimShape(ROWS, sizes.page_size, sizes.window, sizes.chunked)


def run(sizes: Sizes, limits: Sequence[Limits], servers: Sequence[Sequence[Request]]) -> Figures:
    """Always as many servers as there are in every program; those that are added do nothing."""
    spare = SERVERS - len(servers)
    every = stack_limits([*limits, *[limits[0]] * spare])
    return simulate(shape_of(sizes), every, load_of([*servers, *[[]] * spare]))


def expected(sizes: Sizes, chunk: int, requests: Sequence[Request]) -> dict[str, int]:
    """What the plain scheduler comes to."""
    prompts, finals = zip(*requests, strict=True)
    end = Scheduler(sizes, ROWS, chunk, prompts, finals).run()
    figures = dataclasses.asdict(end.figures)
    del figures["peak_all_full"]
    if sizes.pure:
        del figures["peak_full"]
    sums = {
        "sum_running": sum(len(lengths) for lengths in end.lengths),
        "sum_swa_pages": sum(pair[1] for pair in end.pairs),
        "sum_full_tokens": sum(sum(lengths.values()) for lengths in end.lengths),
    }
    return figures | sums


def random_requests(source: random.Random, longest: int) -> list[Request]:
    """Some short prompts that grow long, and anything else that can run alone."""
    requests = []
    for _ in range(source.randint(1, REQUESTS)):
        final = source.randint(1, longest)
        most = final if source.random() < 0.6 else min(final, 5)
        requests.append((source.randint(1, most), final))
    return requests
