"""A server in a thread, and ways to ask it."""

import contextlib
import http.client
import json
import threading
import time

import jax.numpy as jnp
import openai

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.counts import held_pages
from swa_jax.http import Engine, Server, bind, make_app
from swa_jax.state import UNMAPPED

NAME = "tiny"


class Running:
    """A server that answers."""

    def __init__(self, engine, server, port):
        self.engine, self.server, self.port = engine, server, port
        self.url = f"http://127.0.0.1:{port}/v1"

    def client(self, **options):
        return openai.OpenAI(base_url=self.url, api_key="none", **{"max_retries": 0, **options})

    def async_client(self, **options):
        options = {"max_retries": 0, "timeout": 120, **options}
        return openai.AsyncOpenAI(base_url=self.url, api_key="none", **options)

    def ask(self, method, path, body=None):
        """Status, headers and body of a plain request."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, 60)) as line:
            line.request(
                method, path, body if body is None or isinstance(body, bytes) else dumped(body)
            )
            answer = line.getresponse()
            return answer.status, answer.headers, answer.read().decode()

    def metrics(self):
        """All samples, by name and label."""
        status, headers, text = self.ask("GET", "/metrics")
        assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
        return parsed_metrics(text)

    def wait_until_idle(self, seconds=60):
        wait_for(lambda: self.engine.open_jobs == 0, seconds)


def dumped(body):
    return json.dumps(body).encode()


def wait_for(is_so, seconds=60):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


def parsed_metrics(text):
    """As Prometheus reads them: every sample has a HELP and a TYPE before it."""
    samples, kinds = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert kind in ("counter", "gauge", "summary")
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, value = line.rsplit(" ", 1)
            bare = name.partition("{")[0]
            assert bare in kinds or bare.removesuffix("_sum").removesuffix("_count") in kinds
            assert name not in samples
            samples[name.removeprefix("swa_jax_")] = float(value)
    return samples


@contextlib.contextmanager
def running_server(served, tokenizer, *, grace=30.0):
    """Serves in a thread; told to stop at the end, if it has not been before."""
    engine = Engine(served)
    engine.start()
    app = make_app(engine, NAME, tokenizer, served.model.vocab_size)
    with bind("127.0.0.1", 0) as listener:
        server = Server(app, engine, grace=grace, log_level="critical")
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield Running(engine, server, listener.getsockname()[1])
        finally:
            server.stop()
            thread.join(60)
            engine.stop()
    assert not thread.is_alive()


def check_laws(engine):
    """Nobody holds anything but the cache, and nothing went wrong."""

    def look(world):
        swa.check(world.allocator)
        prefix_cache.check(world.cache, world.allocator)
        nodes = world.cache.in_tree
        live = nodes & (world.allocator.full_to_swa != UNMAPPED)
        return (
            [int(pages) for pages in held_pages(world.allocator)],
            [int(jnp.sum(pages)) for pages in (nodes, live)],
            int(jnp.sum(jnp.where(nodes, world.cache.full_locks, 0))),
            int(jnp.sum(world.allocator.faults)),
            int(jnp.sum(world.queue.status)),
        )

    held, cached, locks, faults, places = engine.call(look).result(60)
    assert held == cached
    assert (locks, faults, places) == (0, 0, 0)
