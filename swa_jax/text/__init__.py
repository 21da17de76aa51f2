"""Text to tokens and back, a token at a time."""

from swa_jax.text.completion import CompletionText, Piece
from swa_jax.text.detokenize import Detokenizer
from swa_jax.text.stop import StopFinder
from swa_jax.text.tokenizer import TextTokenizer, TokenizerOf, load_tokenizer

__all__ = (
    "CompletionText",
    "Detokenizer",
    "Piece",
    "StopFinder",
    "TextTokenizer",
    "TokenizerOf",
    "load_tokenizer",
)
