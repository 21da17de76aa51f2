"""Whether two workers can work together, before the first job shows that they cannot."""

from dataclasses import dataclass

import jax

from swa_jax.config import PoolConfig
from swa_jax.disagg.ask import prefill_window
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.prefill_worker import PrefillWorker

Shapes = tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class Hello:
    """What a prefill worker says of itself. Can be pickled."""

    pool: PoolConfig
    prefix_cache: bool
    key_lag: int
    shapes: Shapes  # of a bundle
    address: str = ""  # of its transfer server, where there is one


def hello_of(worker: PrefillWorker, address: str = "") -> Hello:
    """What a worker says of itself."""
    config = worker.config
    return Hello(
        config.pool, config.prefix_cache, config.key_lag, shapes_of(worker.bundle_shape), address
    )


def shapes_of(bundle: object) -> Shapes:
    """Shape and dtype of every array of a bundle."""
    return tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in jax.tree.leaves(bundle))


def check_agree(hello: Hello, worker: DecodeWorker) -> None:
    """Refuses a pair of workers that would lose or misread KV.

    Args:
      hello: of the prefill worker.
      worker: that decodes.

    Raises:
      ValueError: bundles of different shapes (another model, source of drafts, KV dtype or
        `BundleSize`), keys of different kinds, or a window of the prefill side's pool that is
        smaller than what the decode side asks for.
    """
    config = worker.config
    own = shapes_of(worker.bundle_shape)
    if hello.shapes != own:
        raise ValueError(
            "both workers must have one model, source of drafts, KV dtype and BundleSize: the "
            f"prefill side sends {hello.shapes}, the decode side takes {own}"
        )
    if hello.key_lag != config.key_lag:
        raise ValueError(
            "both workers must cache by the same keys, got bigram keys on one side only: key_lag "
            f"is {hello.key_lag} on the prefill side, {config.key_lag} on the decode side"
        )
    need = prefill_window(
        hello.pool, config.pool, config.key_lag, keeps_boundary=hello.prefix_cache
    )
    window = hello.pool.sliding_window
    if window is not None and (need is None or window < need):
        raise ValueError(
            f"the prefill side's pool keeps {window} past tokens, and the decode side asks for "
            f"{'all' if need is None else need}: use PoolConfig(..., sliding_window={need})"
        )
