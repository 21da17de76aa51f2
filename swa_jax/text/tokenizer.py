"""The tokenizer.json of a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

_FILE = "tokenizer.json"


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Token ids, with those that the model wants around a text (such as <bos>)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text, without special tokens. U+FFFD stands for bytes that are no character."""
        ...


class TokenizerOf:
    """A tokenizer of the `tokenizers` library.

    Args:
      tokenizer: `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - the library is not always there
        """With its special tokens as they are."""
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids, special ones as the file has them."""
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """Reads tokenizer.json.

    Args:
      folder: of a checkpoint.

    Raises:
      FileNotFoundError: there is none.
      ModuleNotFoundError: `tokenizers` is not installed.
      ValueError: the file is no tokenizer.
    """
    path = Path(folder) / _FILE
    if not path.exists():
        raise FileNotFoundError(f"a checkpoint needs {_FILE}; there is none in {folder}")
    import tokenizers

    try:
        return TokenizerOf(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises no class of its own
        raise ValueError(f"{path} is no tokenizer: {error}") from None
