"""Answers of the server, as ASGI."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swa_jax.http.errors import ApiError

Result = TypeVar("Result")

MOST_UNREAD_SECONDS = 60.0  # that a client may leave events unread, buffers beside


def as_json(value: object) -> bytes:
    """In ASCII, so that whatever a client sent can be sent back."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def json_answer(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A whole answer."""
    return Response(as_json(value), status, headers, "application/json")


def error_answer(error: ApiError) -> Response:
    """The answer that an error is."""
    return json_answer(error.body(), error.status, error.headers)


class ClientGoneError(Exception):
    """The client has hung up."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives; it is cancelled when the client hangs up.

    Raises:
      ClientGoneError: it has.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer, or one that nobody will read."""
    try:
        return await while_connected(request.receive, work)
    except ClientGoneError:
        return Response(status_code=499)


class EventStream(Response):
    """Server-sent events, each as soon as it is there.

    A client that reads nothing for `MOST_UNREAD_SECONDS` is taken for gone: what it does not read
    takes memory.

    Args:
      events: the data of each.
      closed: left when all are sent or the client hangs up.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], closed: AbstractContextManager[object]
    ) -> None:
        """Nothing is sent yet."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, headers, "text/event-stream")
        del self.headers["content-length"]
        self._events, self._closed = events, closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        with self._closed, contextlib.suppress(ClientGoneError):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._events) as events:
            async for data in events:
                body = b"data: " + data + b"\n\n"
                message = {"type": "http.response.body", "body": body, "more_body": True}
                await _in_time(send(message))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _in_time(sending: Awaitable[None]) -> None:
    """Sends; waits only so long for the client to read what was sent before.

    Raises:
      ClientGoneError: it did not.
    """
    try:
        async with asyncio.timeout(MOST_UNREAD_SECONDS):
            await sending
    except TimeoutError:
        raise ClientGoneError from None
