"""A server to be killed: `python world_server.py PORT CACHE_DIR`. It says when it listens.

Its model's next token is a sum over the text, so plain Python knows every answer.
"""

import sys
import time
from pathlib import Path

from http_server import NAME
from test_serving_host_tier import CONFIG, MODEL

from swa_jax.http import Engine, Served, Server, bind, make_app, serve_until_stopped
from swa_jax.http import engine as engine_module
from swa_jax.http.world_owner import WorldOwner

FIRST = 32
PLACES = 12  # with model and loop of another test, whose programs need not be compiled again


class Letters:
    """A token for each of 97 characters."""

    def encode(self, text):
        return [ord(letter) - FIRST for letter in text]

    def decode(self, tokens):
        return "".join(chr(FIRST + token) for token in tokens)


def answer_to(prompt, count):
    """What the server has to say."""
    return Letters().decode(MODEL.continuation(Letters().encode(prompt), count))


def served(cache_dir=None):
    cache = None if cache_dir is None else Path(cache_dir)
    return Served(
        MODEL,
        None,
        CONFIG,
        steps=1,
        max_waiting=PLACES - CONFIG.max_running,
        cache_dir=cache,
        weights="none",
    )


class Slow(WorldOwner):
    """An answer takes long enough to be in the middle of it."""

    def run(self):
        time.sleep(0.05)
        super().run()


def main(port, cache_dir):
    engine_module.__dict__["WorldOwner"] = Slow
    engine = Engine(served(cache_dir))
    with bind("127.0.0.1", port) as listener:
        engine.start()
        app = make_app(engine, NAME, Letters(), MODEL.vocab_size)
        listener.listen(64)
        print(listener.getsockname()[1], flush=True)
        server = Server(app, engine, grace=5, log_level="critical")
        serve_until_stopped(server, engine, listener)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
