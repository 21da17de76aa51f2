r"""The allocators of today's engines, driven as they are: which of them can be timed here.

None is installed with swa_jax, and none is needed. A peer is found where it can be imported, also
from a source tree on PYTHONPATH. The `peers` extra has what sglang's and vLLM's imports need, far
less than they require to run; `make peers` is the first two lines:

    pip install -e '.[peers]'
    pip install --no-deps sglang==0.5.23
    pip install --no-deps --ignore-requires-python \
        'git+https://github.com/sgl-project/sglang-jax@cddbf6f#subdirectory=python'
    pip install haliax equinox
    git clone https://github.com/stanford-crfm/levanter && git -C levanter checkout 9263f81
    pip download --no-deps --no-binary vllm vllm==0.11.0 && tar xf vllm-0.11.0.tar.gz
    PYTHONPATH=levanter/src:vllm-0.11.0 make bench
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from benchmarks import levanter_side, sglang_jax_side, sglang_side, vllm_side
from swa_jax.bench.side import Maker, Peer
from swa_jax.bench.workload import Point

_INSTALL = "see the docstring of benchmarks/peers.py"


@dataclass(frozen=True)
class _Known:
    name: str
    package: str  # that can be imported where the peer is there
    load: Callable[[], Maker]
    differs: str
    install: str
    per_point: bool = False
    reaches: Callable[[Point], bool] = lambda _: True


_KNOWN = (
    _Known("sglang", "sglang", sglang_side.load, sglang_side.DIFFERS, "`make peers`"),
    _Known("sglang-jax", "sgl_jax", sglang_jax_side.load, sglang_jax_side.DIFFERS, _INSTALL),
    _Known("vLLM", "vllm", vllm_side.load, vllm_side.DIFFERS, _INSTALL),
    _Known(
        "vLLM, pool",
        "vllm",
        vllm_side.load_pool,
        vllm_side.POOL_DIFFERS,
        _INSTALL,
        reaches=vllm_side.pool_reaches,
    ),
    _Known(
        "Levanter",
        "levanter",
        levanter_side.load,
        levanter_side.DIFFERS,
        _INSTALL,
        True,
        levanter_side.reaches,
    ),
)


def find_peers() -> list[Peer]:
    """Every peer, installed or not."""
    return [_find(known) for known in _KNOWN]


def _find(known: _Known) -> Peer:
    if find_spec(known.package) is None:
        return Peer(known.name, None, f"not installed; {known.install}", known.differs)
    try:
        make = known.load()
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError) as error:
        note = f"found, but does not import: {error}; {known.install}"
        return Peer(known.name, None, note, known.differs)
    found = _version(known.package)
    return Peer(known.name, make, found, known.differs, known.per_point, known.reaches)


def _version(package: str) -> str:
    for name in (package, package.replace("sgl_jax", "sglang-jax")):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "a source tree"
