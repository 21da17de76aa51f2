"""The sequences of one HTTP request, from the engine's thread to the event loop's."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

from swa_jax.http.completion_request import CompletionRequest
from swa_jax.http.engine import Engine
from swa_jax.http.jobs import Job, Update
from swa_jax.serving import FINISH_REASONS
from swa_jax.serving.requests import CANCELLED, STOP
from swa_jax.text import CompletionText, Piece, TextTokenizer


class Run:
    """Submits the jobs of a request on entering, and cancels what still runs on leaving.

    Choices are numbered as OpenAI does it: n for the first prompt, then n for the next.

    Args:
      engine: serves.
      asked: the request.
      tokenizer: decodes.
    """

    def __init__(self, engine: Engine, asked: CompletionRequest, tokenizer: TextTokenizer) -> None:
        """In the event loop that will hear of the jobs."""
        self.asked = asked
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        count = len(asked.prompts) * asked.n
        self._jobs = [self._job(choice) for choice in range(count)]
        self._texts = [CompletionText(tokenizer, asked.stops) for _ in range(count)]
        self._open = set(range(count))
        self._cached = [0] * count

    def _job(self, choice: int) -> Job:
        asked = self.asked

        def deliver(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._news.put_nowait, (choice, update))

        return Job(
            prompt=asked.prompts[choice // asked.n].tokens,
            max_new_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=asked.seed_of(choice % asked.n),
            ignore_eos=asked.ignore_eos,
            deliver=deliver,
        )

    def __enter__(self) -> "Run":
        self._engine.submit(self._jobs)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._open:
            self._engine.cancel([self._jobs[choice] for choice in self._open], CANCELLED)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """What each choice says, as it comes; the last piece of a choice has its reason.

        Raises:
          Exception: of an `Update`, where the engine did not go on.
        """
        if self.asked.echo:
            for choice in sorted(self._open):
                yield choice, Piece(self.asked.prompts[choice // self.asked.n].text)
        while self._open:
            choice, update = await self._news.get()
            if choice not in self._open:
                continue
            if update.error is not None:
                raise update.error
            piece = self._piece(choice, update)
            if piece.text or piece.reason:
                yield choice, piece

    def _piece(self, choice: int, update: Update) -> Piece:
        self._cached[choice] = update.cached
        piece = self._texts[choice].add(update.tokens, update.reason)
        if piece.reason is not None:
            self._open.discard(choice)
            if piece.reason == FINISH_REASONS[STOP]:  # it may have been a string: go no further
                self._engine.cancel([self._jobs[choice]], STOP)
        return piece

    def usage(self) -> dict[str, object]:
        """Tokens so far, as OpenAI counts them."""
        prompt = sum(len(prompt.tokens) for prompt in self.asked.prompts)
        output = sum(text.tokens for text in self._texts)
        cached = sum(self._cached[:: self.asked.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
