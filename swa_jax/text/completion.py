"""One request's text, from its tokens and the way it ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from swa_jax.serving.requests import FINISH_REASONS, STOP, UNFINISHED
from swa_jax.text.detokenize import Detokenizer
from swa_jax.text.stop import StopFinder
from swa_jax.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Piece:
    """What some tokens add to a text."""

    text: str
    reason: str | None = None  # why the text ends with this piece, as `FINISH_REASONS` has it


class CompletionText:
    """Turns a request's tokens into pieces of text, however many come at once.

    Args:
      tokenizer: decodes.
      stops: strings before which the text ends.
    """

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str] = ()) -> None:
        """At the beginning of the text."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopFinder(stops)
        self.tokens = 0  # that make up the text so far, one that ends it included

    def add(self, tokens: Sequence[int], reason: int) -> Piece:
        """The piece that new tokens give.

        Args:
          tokens: generated since the last call.
          reason: why the request ended, of `swa_jax.serving.requests`, or UNFINISHED. With STOP
            the last token ends the text and is no part of it.
        """
        text = ""
        for place, token in enumerate(tokens):
            self.tokens += 1
            if reason == STOP and place == len(tokens) - 1:
                break
            text += self._stop.add(self._detokenizer.add(token))
            if self._stop.found:
                return Piece(text, FINISH_REASONS[STOP])
        if reason == UNFINISHED:
            return Piece(text)
        text += self._stop.add(self._detokenizer.rest())
        if self._stop.found:
            return Piece(text, FINISH_REASONS[STOP])
        return Piece(text + self._stop.rest(), FINISH_REASONS[reason])
