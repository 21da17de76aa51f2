"""A checkpoint directory with a random model and a byte-level tokenizer, made on the spot.

python tests/tiny_checkpoint.py toy     makes one to try the command line with
"""

import sys
from pathlib import Path

import jax
import tokenizers
from served_models import tiny
from tokenizers import decoders, models, pre_tokenizers, processors

from swa_jax.models import random_params, save_checkpoint

BOS, EOS = "<bos>", "<eos>"
TEXT = [chr(code) for code in range(32, 127)] + list("\né€你😀")
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n"), ("a", "n")]


def byte_tokenizer():
    """One token for each byte of TEXT, a few for more, and two special ones (ids 0 and 1)."""
    bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = sorted(
        {sign for text in TEXT for name, _ in bare.pre_tokenize_str(text) for sign in name}
    )
    names = [BOS, EOS, *letters, *("".join(merge) for merge in MERGES)]
    vocab = {name: place for place, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.pre_tokenizer = bare
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def save_tiny(folder, *, window=8, **changes):
    """Writes config.json, model.safetensors and tokenizer.json; gives model and parameters."""
    tokenizer = byte_tokenizer()
    vocab = tokenizer.get_vocab_size()
    numbers = {"layer_kinds": "SF", "vocab_size": vocab, "eos": (1,)}
    published = {"attention_scale": 8**-0.5, "embed_scale": 4.0}  # what config.json implies
    model = tiny(window, **{**numbers, **published, **changes})
    params = random_params(model, jax.random.key(3))
    # Large enough that the tokens before matter for the next.
    params = jax.tree.map(lambda weights: weights * 1.5, params)
    save_checkpoint(folder, model, params)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, params


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    save_tiny(target)
