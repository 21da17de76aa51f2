"""Text out of tokens as they come, without ever showing half a character."""

from swa_jax.text.tokenizer import TextTokenizer

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # bytes of a character, so the tokens that it can be spread over
_MOST_SILENT = 16  # tokens without text that are remembered


class Detokenizer:
    """Gives the text of a growing list of tokens piece by piece.

    A token may begin a character that the next one ends, and a decoder may treat the first token
    of a text in its own way (a space that it drops). So a piece is what decoding adds to the text
    of the tokens just before, and it waits while it ends in bytes that are no character yet.

    Args:
      tokenizer: decodes.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """At the beginning of the text."""
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # tokens of the last piece: what the next one is read after
        self._held: list[int] = []  # tokens whose text is not out yet

    def add(self, token: int) -> str:
        """The text that a token completes, often its own, or nothing yet."""
        self._held.append(token)
        text = self._text(self._held)
        if not text.endswith(_NO_CHARACTER):
            return self._show(text, len(self._held))
        if len(self._held) <= 2 * _LONGEST:
            return ""
        # These bytes are no character at all, except that the last three may begin one.
        ready = len(self._held) - (_LONGEST - 1)
        return self._show(self._text(self._held[:ready]), ready)

    def rest(self) -> str:
        """What was still waiting; the text ends here."""
        return self._show(self._text(self._held), len(self._held)) if self._held else ""

    def _text(self, tokens: list[int]) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + tokens)[len(before) :]

    def _show(self, text: str, count: int) -> str:
        if text:
            self._shown = self._held[:count]
        elif len(self._shown) < _MOST_SILENT:  # such tokens may still count for the next one
            self._shown = self._shown + self._held[:count]
        self._held = self._held[count:]
        return text
