"""Traces that ship with the package."""

import importlib.resources
from importlib.resources.abc import Traversable

BUNDLED = {"mooncake-conversation": "mooncake-conversation.jsonl"}


def bundled_file(name: str) -> Traversable:
    """The file of a bundled trace; see `data/README.md` for where it comes from."""
    return importlib.resources.files("swa_jax") / "data" / BUNDLED[name]
