"""Text out of tokens as they come: whole characters, stop strings, the same in any portions."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import byte_tokenizer
from tokenizers import decoders, models

from swa_jax.serving.requests import LENGTH, STOP, UNFINISHED
from swa_jax.text import CompletionText, Detokenizer, StopFinder, TokenizerOf, load_tokenizer

BYTES = byte_tokenizer()
TOKENIZER = TokenizerOf(BYTES)
TOKENS = st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=40)
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def pieces(tokenizer, tokens):
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.add, tokens), detokenizer.rest()]


@given(TOKENS)
def test_pieces_add_up_to_the_text(tokens):
    assert "".join(pieces(TOKENIZER, tokens)) == TOKENIZER.decode(tokens)


@given(st.text("aé€你😀 th", max_size=20))
def test_a_character_is_never_split(text):
    found = pieces(TOKENIZER, BYTES.encode(text, add_special_tokens=False).ids)
    assert "".join(found) == text
    assert NO_CHARACTER not in "".join(found)


def test_half_a_character_waits():
    tokens = BYTES.encode("a😀b", add_special_tokens=False).ids
    assert pieces(TOKENIZER, tokens) == ["a", "", "", "", "😀", "b", ""]
    assert pieces(TOKENIZER, tokens[:3]) == ["a", "", "", NO_CHARACTER]


def test_bytes_that_are_no_characters_do_not_wait_for_ever():
    lead = BYTES.encode("😀", add_special_tokens=False).ids[0]
    found = pieces(TOKENIZER, [lead] * 100)
    assert "".join(found) == NO_CHARACTER * 100
    assert len(found[-1]) < 10


def test_a_decoder_that_drops_the_first_space():
    words = {"▁a": 0, "▁b": 1, "▁": 2, "<pad>": 3}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer = TokenizerOf(tokenizer)
    for tokens in ([0, 1, 0], [2, 2, 0], [3, 0, 1], [3] * 40 + [0, 3, 1], [0, 2, 2, 1]):
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("stops", "parts", "shown"),
    [
        (["bc"], ["a", "b", "c", "d"], "a"),
        (["bc"], ["a", "b", "d"], "abd"),
        (["abab"], ["a", "b", "a", "a", "b", "a", "b"], "aba"),
        (["xyz", "b"], ["a", "bxyz"], "a"),
        (["xyz", "b"], ["axy", "zb"], "a"),
        (["abcd", "c"], ["ab", "c"], "ab"),
        (["x"], ["", "ab", ""], "ab"),
        ([], ["a", "b"], "ab"),
        (["ab"], ["a"], "a"),
    ],
)
def test_stop_strings(stops, parts, shown):
    finder = StopFinder(stops)
    safe = [finder.add(part) for part in parts]
    assert "".join(safe) + finder.rest() == shown
    assert finder.found == ("".join(parts) != shown)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_nothing_of_a_stop_string_is_shown(text, stops):
    finder = StopFinder(stops)
    shown = "".join(map(finder.add, text)) + finder.rest()
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert finder.found == any(stop in text for stop in stops)


@given(TOKENS, st.integers(0, 40), st.sampled_from([STOP, LENGTH]))
def test_portions_make_no_difference(tokens, cut, reason):
    at_once = CompletionText(TOKENIZER, ["th", "a "])
    by_two = CompletionText(TOKENIZER, ["th", "a "])
    whole = at_once.add(tokens, reason)
    first = by_two.add(tokens[:cut], UNFINISHED if tokens[cut:] else reason)
    if first.reason is not None:
        assert (first, by_two.tokens) == (whole, at_once.tokens)
        return
    second = by_two.add(tokens[cut:], reason)
    assert (first.text + second.text, second.reason) == (whole.text, whole.reason)
    assert by_two.tokens == at_once.tokens


def test_the_token_that_ends_a_text_is_not_shown():
    a, b = BYTES.encode("ab", add_special_tokens=False).ids
    text = CompletionText(TOKENIZER)
    assert text.add([a, b], STOP).text == "a"
    assert text.tokens == 2


def test_a_tokenizer_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"needs tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer"):
        load_tokenizer(tmp_path)
