"""Prefill in one process, decode in another: a soak of conversations with a share of them aborted.

    python -m benchmarks.disagg [--requests N] [--abort-share X] [--seed N] [--json FILE]

A tiny model with full and SWA layers and a draft head (MTP) serves conversations of four turns;
every turn's prompt is the whole conversation so far, so the decode side has most of it and only the
rest is sent. The two workers have pages and pools of different sizes. Messages go by
`multiprocessing.connection`, KV by JAX's transfer server. A share of the requests is cancelled on
their way: before they are ready, before they are asked for, between pieces, before and after they
get their row.

Then one worker alone serves the same prompts, and every token is compared. At the end both sides
hold what their caches hold and nothing else, all laws are checked, and no misuse was counted.
"""

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.bench.environment import environment
from swa_jax.counts import held_pages
from swa_jax.disagg.ask import prefill_window
from swa_jax.disagg.bundles import BundleSize
from swa_jax.disagg.decode_peer import ARRIVED, ASKED, READY, RUNNING, DecodePeer, Traffic
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.inbox import reserved_pages
from swa_jax.disagg.jobs import Job, Outcome
from swa_jax.disagg.prefill_worker import PrefillWorker
from swa_jax.disagg.processes import join_prefill, serve_prefill
from swa_jax.disagg.sizes import token_bytes
from swa_jax.models import DecoderConfig, random_params
from swa_jax.models.decoder.rope import Rope
from swa_jax.serving import (
    DraftHead,
    ServingConfig,
    World,
    random_head_params,
    world_pools,
)
from swa_jax.serving.trees import Tree
from swa_jax.state import UNMAPPED
from swa_jax.window import frontier

TURNS, SYSTEM, SAID, NEW = 4, 8, 8, 6  # most tokens of each
CONTEXT = SYSTEM + TURNS * (SAID + NEW)
SIZE = BundleSize(pieces=16, full_tokens=8, swa_tokens=8)
AT_ONCE = 64  # conversations
AUTH = "SWA_JAX_DISAGG_KEY"
CANCELLED = "cancelled"


def model_of() -> DecoderConfig:
    """Two SWA and two full layers, 16 hidden units."""
    rope = Rope(theta=10_000.0)
    return DecoderConfig(
        family="gemma3",
        vocab_size=61,
        hidden_size=16,
        num_heads=2,
        kv_heads=1,
        head_dim=8,
        intermediate_size=16,
        layer_kinds="SFSF",
        sliding_window=7,
        full_rope=rope,
        swa_rope=rope,
        attention_scale=0.35,
        max_context=128,
        qk_norm=True,
        tie_embeddings=False,
    )


def params_of(model: DecoderConfig, seed: int) -> tuple[Tree, Tree]:
    """Random parameters, and a head that is right now and then.

    The layers say less than the last token does, so that a head that only looks at that guesses
    well; they say enough for a page of somebody else to show.
    """
    params = random_params(model, jax.random.key(seed))
    params = jax.tree.map(lambda weights: weights * jnp.float32(1.5), params)
    head = random_head_params(model, jax.random.key(seed + 1))

    def softer(layer: Tree, by: float) -> Tree:
        return {name: w * by if name in ("o", "down") else w for name, w in layer.items()}

    params = {**params, "layers": tuple(softer(layer, 0.5) for layer in params["layers"])}
    size = model.hidden_size
    project = jnp.concatenate([jnp.zeros((size, size)), jnp.eye(size)])
    head = {**head, "project": project, "layer": softer(head["layer"], 0.1)}
    return params, {"head": {**head, "final_norm": params["final_norm"]}, "model": params}


def configs() -> tuple[ServingConfig, ServingConfig]:
    """Of the prefill worker and of the decode worker."""
    model = model_of()
    draft = DraftHead(model, 2)
    decode = swa.PoolConfig(4096, 640, 4, model.past_window)
    page = swa.PoolConfig(2048, 1024, 8, model.past_window)
    window = prefill_window(page, decode, key_lag=1)
    prefill = dataclasses.replace(page, sliding_window=window)
    common: dict[str, Any] = {"max_context": CONTEXT, "chunk_tokens": 16, "draft": draft}
    return (
        ServingConfig(prefill, max_running=16, prefill_rows=8, role="prefill", **common),
        ServingConfig(decode, max_running=16, prefill_rows=4, max_new_tokens=NEW, **common),
    )


# ---- what is asked ----------------------------------------------------------------------------


@dataclass
class Talks:
    """Conversations: whose turn is next, and what each was told so far."""

    count: int  # requests in all
    seed: int
    first: int = 0  # name
    long: frozenset[int] = frozenset()  # names that want as many tokens as there may be
    made: int = 0
    _texts: dict[int, list[int]] = field(default_factory=dict)  # by conversation
    _of: dict[int, tuple[int, int]] = field(default_factory=dict)  # conversation and turn by name
    _open: deque[tuple[int, int]] = field(default_factory=deque)  # may speak next
    _begun: int = 0

    def __post_init__(self) -> None:
        """No conversation has begun."""
        self._random = random.Random(self.seed)
        systems = range(8)
        self._systems = [[self._random.randrange(61) for _ in range(SYSTEM)] for _ in systems]

    def speak(self, room: int) -> Iterator[Job]:
        """At most so many jobs that can be asked now."""
        for _ in range(room):
            if self.made == self.count:
                return
            if not self._open:
                self._texts[self._begun] = list(self._random.choice(self._systems))
                self._open.append((self._begun, 0))
                self._begun += 1
            talk, turn = self._open.popleft()
            said = self._random.randrange(2, SAID + 1)
            text = self._texts[talk]
            text += [self._random.randrange(61) for _ in range(said)]
            name, self.made = self.first + self.made, self.made + 1
            self._of[name] = talk, turn
            new = self._random.randrange(1, NEW + 1)
            yield Job(name, tuple(text), max_new_tokens=NEW if name in self.long else new)

    def hear(self, outcome: Outcome) -> None:
        """The answer becomes part of the conversation."""
        talk, turn = self._of.pop(outcome.name)
        self._texts[talk] += outcome.tokens
        if turn + 1 < TURNS:
            self._open.append((talk, turn + 1))
        else:
            del self._texts[talk]


# At a piece: when the ask is out (0), after the first piece (1).
POINTS = ("prefill", READY, ASKED, "piece", ARRIVED, RUNNING, "decoding")


class Aborts:
    """Who is cancelled where."""

    def __init__(self, count: int, share: float, seed: int) -> None:
        """Chosen beforehand."""
        chosen = random.Random(seed)
        names = chosen.sample(range(count), round(count * share))
        self.point = {name: chosen.choice(POINTS) for name in names}
        self.left_at: Counter[str] = Counter()
        self._asked: Counter[int] = Counter()
        self._later: dict[int, int] = {}  # turns to go
        self._chosen = chosen

    def on_stage(self, name: int, stage: str) -> bool:
        """For `DecodePeer`."""
        point = self.point.get(name)
        if point is None:
            return False
        if stage == ASKED:
            self._asked[name] += 1
            stage = ASKED if self._asked[name] == 1 else "piece"
        if stage == ARRIVED and point == "piece":
            stage = "piece"  # it took one
        if stage == RUNNING and point == "decoding":
            self._later[name] = 0
        if stage == point:
            self.left_at[stage] += 1
        return stage == point

    def begin(self, names: Sequence[int]) -> None:
        """These were handed in."""
        for name in names:
            if self.point.get(name) == "prefill":
                self._later[name] = self._chosen.randrange(0, 3)

    def due(self) -> list[int]:
        """A turn has passed: who is cancelled now."""
        names = [name for name, turns in self._later.items() if turns == 0]
        self._later = {name: turns - 1 for name, turns in self._later.items() if turns > 0}
        self.left_at.update(self.point[name] for name in names)
        return names


# ---- both sides -------------------------------------------------------------------------------


def leaked(world: World) -> int:
    """Pages that are held and not cached, in both pools; the laws hold and nothing was misused."""
    assert world.cache is not None
    swa.check(world.allocator)
    prefix_cache.check(world.cache, world.allocator)
    faults = swa.faults(world.allocator)
    assert not any(faults.values()), faults
    full, of_swa = (int(pages) for pages in jax.device_get(held_pages(world.allocator)))
    in_tree = np.asarray(world.cache.in_tree)
    live = in_tree & (np.asarray(world.allocator.full_to_swa) != UNMAPPED)
    assert not np.asarray(world.cache.full_locks)[in_tree].any()
    return full - int(in_tree.sum()) + of_swa - int(live.sum())


def figures(world: World) -> dict[str, int]:
    """The stats of a worker."""
    return {name: int(value) for name, value in jax.device_get(vars(world.stats)).items()}


def run_prefill(port: int, seed: int) -> None:
    """The other process: serves until the decode side says goodbye, then tells what it holds."""
    params, draft_params = params_of(model_of(), seed)
    worker = PrefillWorker(
        model_of(), configs()[0], params, draft_params=draft_params, places=96, size=SIZE
    )
    serve_prefill(worker, ("127.0.0.1", port), os.environ[AUTH].encode())
    print(json.dumps({"leaked_pages": leaked(worker.world), **figures(worker.world)}), flush=True)


def start_prefill(port: int, key: str, seed: int) -> subprocess.Popen[str]:
    """The prefill worker in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.disagg", "--prefill-for", str(port)]
    return subprocess.Popen(
        [*command, "--seed", str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, AUTH: key},
    )


def talk(peer: DecodePeer, talks: Talks, aborts: Aborts) -> tuple[dict[int, Job], list[Outcome]]:
    """Serves all conversations; every job and what became of it."""
    jobs: dict[int, Job] = {}
    outcomes: list[Outcome] = []
    while len(outcomes) < talks.count:
        new = list(talks.speak(AT_ONCE - peer.open_jobs))
        if new:
            jobs |= {job.name: job for job in new}
            peer.submit(new)
            aborts.begin([job.name for job in new])
        peer.cancel(aborts.due())
        for outcome in peer.turn():
            talks.hear(outcome)
            outcomes.append(outcome)
            if len(outcomes) % 1024 == 0:
                print(f"{len(outcomes)} requests", file=sys.stderr, flush=True)
        if not peer.open:
            raise RuntimeError("the prefill side has gone")
        if peer.is_waiting:
            peer.wait(0.002)
    return jobs, outcomes


def alone(worker: DecodeWorker, jobs: Sequence[Job], *, wave: int = 48) -> dict[int, Outcome]:
    """One worker that prefills and decodes the same jobs, in the same order."""
    waits, outcomes = deque(jobs), {}
    while waits or worker.running:
        while waits and worker.running < wave:
            worker.submit([waits.popleft() for _ in range(min(len(waits), SIZE.pieces))])
        for outcome in worker.turn(8):
            outcomes[outcome.name] = outcome
    return outcomes


def differing(outcomes: Sequence[Outcome], right: dict[int, Outcome]) -> list[dict[str, Any]]:
    """Whoever has not the right tokens; of a request that was aborted those that there are."""
    wrong = []
    for outcome in outcomes:
        wanted, aborted = right[outcome.name], outcome.reason == CANCELLED
        tokens = wanted.tokens[: len(outcome.tokens)] if aborted else wanted.tokens
        if outcome.tokens != tokens or not (aborted or outcome.reason == wanted.reason):
            wrong.append({"got": dataclasses.asdict(outcome), "right": dataclasses.asdict(wanted)})
    return wrong


def soak(requests: int, share: float, seed: int) -> dict[str, Any]:
    """The whole of it."""
    model, (_, config) = model_of(), configs()
    params, draft_params = params_of(model, seed)

    def decode_worker() -> DecodeWorker:
        return DecodeWorker(
            model,
            config,
            params,
            draft_params=draft_params,
            places=64,
            reservations=16,
            size=SIZE,
        )

    worker, key = decode_worker(), os.urandom(16).hex()
    aborts = Aborts(requests, share, seed)
    with Listener(("127.0.0.1", 0), authkey=key.encode()) as listener:
        process = start_prefill(listener.address[1], key, seed)  # type: ignore[index]
        with listener.accept() as channel:
            peer = join_prefill(worker, channel, on_stage=aborts.on_stage)
            # Everything is compiled by these, and then counted from the start.
            talk(peer, Talks(64, seed + 1, first=requests), Aborts(0, 0, seed))
            peer.traffic, start = Traffic(), time.perf_counter()
            jobs, outcomes = talk(peer, Talks(requests, seed, long=frozenset(aborts.point)), aborts)
            seconds = time.perf_counter() - start
            while worker.running:
                peer.turn()
            peer.close()
    other = json.loads(process.communicate(timeout=120)[0].strip().splitlines()[-1])
    reserved = [int(pages) for pages in reserved_pages(worker.arrivals.inbox)]
    right = alone(decode_worker(), list(jobs.values()))
    wrong = differing(outcomes, right)
    completed = [outcome for outcome in outcomes if outcome.reason != CANCELLED]
    return {
        "requests": requests,
        "aborted": requests - len(completed),
        "aborted_at": dict(aborts.left_at),
        "reasons": dict(Counter(outcome.reason for outcome in outcomes)),
        "completed": len(completed),
        "equal": requests - len(wrong),
        "wrong": wrong[:8],
        "leaked_pages": {
            "decode": leaked(worker.world) + sum(reserved),
            "prefill": other["leaked_pages"],
        },
        "tokens": sum(len(outcome.tokens) for outcome in outcomes),
        "seconds": round(seconds, 1),
        "requests_per_s": round(requests / seconds, 2),
        **traffic(model, config, worker, peer, jobs.values()),
        "stale": int(worker.arrivals.inbox.refused),
        "decode": figures(worker.world),
        "prefill": other,
        "environment": environment(),
    }


def traffic(
    model: DecoderConfig,
    config: ServingConfig,
    worker: DecodeWorker,
    peer: DecodePeer,
    jobs: Sequence[Job] | Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Bytes of KV a request: with tail and reuse, with the tail alone, and sending everything."""
    full, of_swa = token_bytes(world_pools(model, config, worker.world))
    seen, pool = peer.traffic, config.pool
    lens = np.array([len(job.prompt) - 1 for job in jobs], np.int32)
    whole = np.maximum(lens - config.key_lag, 0) // pool.page_size * pool.page_size
    edge = np.asarray(frontier(pool, jnp.asarray(lens), jnp.asarray(whole, jnp.int32)))
    tail = (lens.sum() * full + (lens - edge).sum() * of_swa) / len(lens)
    asked = max(seen.requests, 1)
    return {
        "bytes_a_request": {
            "tail_and_reuse": round(
                (seen.full_tokens * full + seen.swa_tokens * of_swa) / asked, 1
            ),
            "tail": round(float(tail), 1),
            "everything": round(float(lens.mean()) * (full + of_swa), 1),
        },
        "asked": dataclasses.asdict(seen),
    }


def main(argv: list[str] | None = None) -> None:
    """Runs the soak and prints what it found; the exit status says whether all was right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_240)
    parser.add_argument("--abort-share", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prefill-for", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.prefill_for is not None:
        run_prefill(args.prefill_for, args.seed)
        return
    found = soak(args.requests, args.abort_share, args.seed)
    text = json.dumps(found, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    right = found["equal"] == args.requests and not any(found["leaked_pages"].values())
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
