"""POST /v1/completions: the answer whole, or event by event."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from swa_jax.http.answers import EventStream, as_json, json_answer, unless_gone
from swa_jax.http.completion_request import Limits, completion_request
from swa_jax.http.engine import Engine
from swa_jax.http.errors import EngineError, QueueFullError, StoppingError, answer_to
from swa_jax.http.json_body import read_object
from swa_jax.http.run import Run
from swa_jax.text import TextTokenizer

_NOT_SERVED = (EngineError, QueueFullError, StoppingError)


class Completions:
    """Answers requests for completions.

    Args:
      engine: serves them.
      limits: of the server.
      tokenizer: of the model.
    """

    def __init__(self, engine: Engine, limits: Limits, tokenizer: TextTokenizer) -> None:
        """With what it answers."""
        self._engine, self._limits, self._tokenizer = engine, limits, tokenizer

    async def create(self, request: Request) -> Response:
        """One request."""
        body = await read_object(request)
        # A long prompt takes its time.
        asked = await run_in_threadpool(completion_request, body, self._limits, self._tokenizer)
        run = Run(self._engine, asked, self._tokenizer)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(run)
            except _NOT_SERVED as error:
                raise answer_to(error) from None
            if not asked.stream:
                return await unless_gone(request, self._whole(run))
            return EventStream(self._events(run), stack.pop_all())

    def _head(self) -> dict[str, object]:
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._limits.model_name,
        }

    async def _whole(self, run: Run) -> Response:
        texts = [""] * (len(run.asked.prompts) * run.asked.n)
        reasons: list[str | None] = [None] * len(texts)
        try:
            async for choice, piece in run.pieces():
                texts[choice] += piece.text
                reasons[choice] = piece.reason
        except _NOT_SERVED as error:
            raise answer_to(error) from None
        choices = [
            _choice(place, text, reason)
            for place, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return json_answer(self._head() | {"choices": choices, "usage": run.usage()})

    async def _events(self, run: Run) -> AsyncGenerator[bytes, None]:
        head = self._head()
        no_usage = {"usage": None} if run.asked.include_usage else {}
        try:
            async for choice, piece in run.pieces():
                choices = [_choice(choice, piece.text, piece.reason)]
                yield as_json(head | {"choices": choices} | no_usage)
        except _NOT_SERVED as error:
            yield as_json(answer_to(error).body())
            return
        if run.asked.include_usage:
            yield as_json(head | {"choices": [], "usage": run.usage()})
        yield b"[DONE]"


def _choice(place: int, text: str, reason: str | None) -> dict[str, object]:
    return {"text": text, "index": place, "logprobs": None, "finish_reason": reason}
