"""A saved allocator for whoever was not told what it was made of: to look at, to check, to draw."""

from pathlib import Path

import jax

from swa_jax.config import PoolConfig
from swa_jax.describe import Plain, describe
from swa_jax.prefix_cache import CacheConfig, PrefixCache
from swa_jax.prefix_cache.tree import new_cache
from swa_jax.replay.trace_lines import show
from swa_jax.saved_state.directory import read_arrays, read_made
from swa_jax.saved_state.leaves import forms_of, from_arrays
from swa_jax.saved_state.turns import reading
from swa_jax.state import AllocatorState, init
from swa_jax.unified import UnifiedLayout


def open_state(path: str | Path) -> tuple[AllocatorState, PrefixCache | None]:
    """What `save_state` or `save_world` saved last, without its KV.

    Args:
      path: a directory, as for `save_state`.

    Returns:
      The allocator as it was saved, and the prefix cache beside it; None where none was saved.

    Raises:
      FileNotFoundError: there is no finished save.
      ImportError: Orbax is not installed (the extra `checkpoint`).
      ValueError: what is there is damaged, or no saved state that this version knows.
    """
    with reading(Path(path).absolute()):  # both from one save
        return _open(path)


def _open(path: str | Path) -> tuple[AllocatorState, PrefixCache | None]:
    made = read_made(path)
    config, tree = _configs(path, made)
    # By shape alone: a stranger may have written sizes that nothing he saved comes up to.
    state = jax.eval_shape(lambda: init(config))
    cache = None if tree is None else jax.eval_shape(lambda: new_cache(tree))
    forms = forms_of("state", state) | ({} if cache is None else forms_of("cache", cache))
    arrays = read_arrays(path, made, forms)
    state = from_arrays("state", state, arrays)
    return state, None if cache is None else from_arrays("cache", cache, arrays)


def _configs(path: str | Path, made: Plain) -> tuple[PoolConfig, CacheConfig | None]:
    """The configurations that a description is of, known by describing them again."""
    try:
        config = _pool_config(made["pool"])
        tree = None if made["cache"] is None else CacheConfig(pool=config, **made["cache"])
        known = describe(config) == made["pool"]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = show(error)
        raise ValueError(f"{path} is of no pool that this version knows: {why}") from error
    if not known:
        raise ValueError(f"{path} is of no pool that this version knows: {show(made['pool'])}")
    return config, tree


def _pool_config(described: Plain) -> PoolConfig:
    fields = {name: value for name, value in described.items() if name != "kind"}
    layout = fields.pop("unified_layout")
    if layout is not None:
        layout = UnifiedLayout(**{name: n for name, n in layout.items() if name != "kind"})
    return PoolConfig(**fields, unified_layout=layout)
