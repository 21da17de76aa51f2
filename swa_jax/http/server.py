"""The server's process: it listens, and stops without breaking off what it can still finish."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from swa_jax.http.engine import Engine

_TO_SAY_SO = 5  # seconds in which requests that were cut off can be told


class Server(uvicorn.Server):
    """Serves an application until it is told to stop.

    From then on nothing new is taken. What runs may finish; what still runs at the limit gets an
    error.

    Args:
      app: of `make_app`.
      engine: of the application; started.
      grace: seconds that running requests may take after SIGTERM or Ctrl-C.
      log_level: of uvicorn.
    """

    def __init__(
        self, app: Starlette, engine: Engine, *, grace: float, log_level: str = "info"
    ) -> None:
        """With uvicorn's own settings."""
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=int(grace) + _TO_SAY_SO,
        )
        super().__init__(config)
        self._engine, self._grace = engine, grace
        engine.on_failure = self.stop

    def stop(self) -> None:
        """As SIGTERM does; from any thread."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for running requests up to the limit, then cuts them off."""
        self._engine.drain()
        cutting = asyncio.ensure_future(self._cut_late())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_late(self) -> None:
        await asyncio.sleep(self._grace)
        if self._engine.open_jobs:
            self._engine.cut()


def bind(host: str, port: int) -> socket.socket:
    """A socket to serve on. Until then nobody can connect to it.

    Args:
      host: a name or an address.
      port: 0: any that is free.

    Raises:
      OSError: it is in use, not ours to take, or there is no such host.
    """
    [(family, *_, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def serve_until_stopped(server: Server, engine: Engine, listener: socket.socket) -> None:
    """Serves in this thread, the main one, until SIGTERM, Ctrl-C or a failure of the engine.

    Raises:
      Exception: what made the engine fail.
      KeyboardInterrupt: Ctrl-C was pressed, and all is over.
    """
    try:
        with _terminates_quietly():
            server.run([listener])
    finally:
        engine.stop()
    if engine.error is not None:
        raise engine.error


@contextlib.contextmanager
def _terminates_quietly() -> Iterator[None]:
    """Survives that uvicorn raises the SIGTERM which stopped it once more."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
