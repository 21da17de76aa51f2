"""Which stores of the host replay can be made here: plain Python, and what is installed.

How the engines are installed is told in `benchmarks/peers.py`; vLLM's files in `vllm_classes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from benchmarks.replay_store import PlainStore, Store
from benchmarks.sglang_classes import load_sglang
from benchmarks.sglang_jax_store import SglangJaxStore
from benchmarks.sglang_store import SglangStore
from benchmarks.vllm_classes import load_vllm
from benchmarks.vllm_store import VllmStore
from swa_jax.config import PoolConfig

Maker = Callable[[PoolConfig, int, int], Store]  # pools, rows, longest request


@dataclass(frozen=True)
class StorePeer:
    """How to make a store, or why it is not there.

    Attributes:
      name: of the engine.
      make: None where it cannot be made.
      note: its version, or what is missing.
      differs: what it does otherwise than swa_jax, so that totals may differ.
    """

    name: str
    make: Maker | None
    note: str
    differs: str

    @property
    def is_engine(self) -> bool:
        """False for plain Python, which is nobody's engine."""
        return self.name != PlainStore.name


_PLAIN = "nothing: the same rules, so all totals must be equal"
_SGLANG = (
    "keeps SWA pages of a prefix only at the ends of chunks, and at a branch once a second prompt "
    "has come there; evicts segments whole"
)
_SGLANG_JAX = (
    "locks SWA by segments, so a whole chunk stays live while its request runs; evicts segments "
    "whole; has no way to give a lock up early, so it retracts sooner"
)
_VLLM = (
    "one pool of as many blocks for both kinds; keeps blocks by their hash, not in a tree; what is "
    "generated is cached as it comes; prompts are hashed before the clock runs"
)


def find_stores(*, engines: bool = True) -> list[StorePeer]:
    """Plain Python and, if asked for, every engine, installed or not."""
    plain = StorePeer(
        PlainStore.name, lambda config, rows, _: PlainStore(config, rows), "always here", _PLAIN
    )
    if not engines:
        return [plain]
    return [
        plain,
        _find(SglangStore.name, lambda: load_sglang().version, SglangStore, _SGLANG),
        _find(SglangJaxStore.name, _sglang_jax, SglangJaxStore, _SGLANG_JAX),
        _find(VllmStore.name, lambda: load_vllm().version, VllmStore, _VLLM),
    ]


def _find(name: str, load: Callable[[], str], make: Maker, differs: str) -> StorePeer:
    try:
        return StorePeer(name, make, load(), differs)
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError) as error:
        return StorePeer(name, None, f"cannot be imported: {error}", differs)


def _sglang_jax() -> str:
    import_module("sgl_jax.srt.mem_cache.swa_radix_cache")
    try:
        return version("sglang-jax")
    except PackageNotFoundError:
        return "a source tree"
