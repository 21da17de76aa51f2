"""vLLM's own v1 cache manager, imported from its files without the rest of vLLM.

The manager of KV blocks is plain Python, yet importing it imports vLLM's engine, models and
compiled kernels. Here only the files that do the work are loaded (`_OWN`), from an installed `vllm`
or from an unpacked source tree on PYTHONPATH; what they name of the rest of vLLM is a stand-in for
the length of the import. Types are empty classes; the few functions that are called are written
anew (`_parts`). No GPU, no compiled code and none of vLLM's dependencies but torch are needed.

    pip download --no-deps --no-binary vllm vllm==0.11.0 && tar xf vllm-0.11.0.tar.gz
    PYTHONPATH=vllm-0.11.0 python -m benchmarks.vllm_classes
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.abc
import importlib.util
import logging
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from swa_jax.bench.side import Native

VERSION = "0.11.0"  # the one that the stand-ins were made for
_CORE = "vllm.v1.core."
_OWN = frozenset(
    {
        _CORE + "block_pool",
        _CORE + "kv_cache_coordinator",
        _CORE + "kv_cache_manager",
        _CORE + "kv_cache_utils",
        _CORE + "single_type_kv_cache_manager",
        "vllm.v1.kv_cache_interface",
        "vllm.v1.request",
    }
)


@dataclass(frozen=True)
class VllmClasses:
    """What is needed to make a cache manager and to call it."""

    block_pool: Native  # module with class BlockPool
    manager: Native  # module with class KVCacheManager
    utils: Native  # module with the hashes of blocks
    interface: Native  # module with the specifications of layers
    request: Native  # module with class Request
    version: str

    def new_pool(self, blocks: int, *, caching: bool = False) -> Native:
        """A `BlockPool` of `blocks` usable blocks; block 0 is its own."""
        return self.block_pool.BlockPool(blocks + 1, caching)

    def new_manager(
        self,
        blocks: int,
        page_size: int,
        window: int | None,
        *,
        max_tokens: int,
        caching: bool = True,
    ) -> Native:
        """A `KVCacheManager` of one pool for a group of full and a group of SWA layers.

        The groups are of one size, as gpt-oss's are: a block holds one page of either.

        Args:
          blocks: usable blocks of the pool, for both groups together.
          page_size: tokens in a block.
          window: past tokens that a token sees, as in `PoolConfig`; vLLM counts the token itself,
            too. None for a model of full layers alone.
          max_tokens: the longest request.
          caching: keep the blocks of finished requests for prefixes.
        """
        kind = self.interface
        layer = {
            "block_size": page_size,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": importlib.import_module("torch").bfloat16,
        }
        specs: list[Any] = [kind.FullAttentionSpec(**layer)]
        if window is not None:
            specs.append(kind.SlidingWindowSpec(**layer, sliding_window=window + 1))
        groups = [
            kind.KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)
        ]
        config = kind.KVCacheConfig(
            num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups
        )
        return self.manager.KVCacheManager(config, max_model_len=max_tokens, enable_caching=caching)

    def new_request(self, name: str, tokens: list[int], page_size: int) -> Native:
        """A `Request`; its prompt's blocks are hashed here, by vLLM's default function."""
        hasher = self.utils.get_request_block_hasher(page_size, _sha256)
        return self.request.Request(
            name, tokens, _greedy(), pooling_params=None, eos_token_id=None, block_hasher=hasher
        )


def _greedy() -> types.SimpleNamespace:
    """What a request reads of its sampling parameters."""
    return types.SimpleNamespace(
        max_tokens=2**31, structured_outputs=None, extra_args=None, prompt_logprobs=None
    )


@functools.cache
def load_vllm() -> VllmClasses:
    """Imports the classes, once.

    Raises:
      ImportError: what is missing, as `missing` says it, or what is not as in `VERSION`.
    """
    reason = missing()
    if reason:
        raise ImportError(reason)
    root = _root()
    assert root is not None
    found = _version(root)
    try:
        with _alone(root):
            modules = {name: importlib.import_module(name) for name in sorted(_OWN)}
    except (AttributeError, ImportError, TypeError) as error:
        raise ImportError(
            f"vllm {found} in {root} cannot be loaded without the rest of vllm: {error}; "
            f"the files are expected to be those of {VERSION}"
        ) from error
    utils = modules[_CORE + "kv_cache_utils"]
    utils.init_none_hash(_sha256)
    return VllmClasses(
        modules[_CORE + "block_pool"],
        modules[_CORE + "kv_cache_manager"],
        utils,
        modules["vllm.v1.kv_cache_interface"],
        modules["vllm.v1.request"],
        found,
    )


def missing() -> str:
    """Why vLLM's files cannot be loaded here, "" where it should work. Imports nothing."""
    if importlib.util.find_spec("torch") is None:
        return "not installed: torch"
    root = _root()
    if root is None:
        return (
            f"not installed: vllm (or put the source tree of {VERSION} on PYTHONPATH; none of it "
            "is built)"
        )
    lacking = sorted(name for name in _OWN if not _file(root, name).exists())
    if lacking:
        return f"vllm {_version(root)} in {root} has no {', '.join(lacking)}; need {VERSION}"
    return ""


def _root() -> Path | None:
    """The folder that holds the package's folder."""
    spec = importlib.util.find_spec("vllm")
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))).parent if places else None


def _file(root: Path, name: str) -> Path:
    return root.joinpath(*name.split(".")).with_suffix(".py")


def _version(root: Path) -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:  # a bare tree names its version in the description beside it
        notes = root / "PKG-INFO"
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
        return next((line[9:] for line in lines if line.startswith("Version: ")), "unknown")


class _StandIn(types.ModuleType):
    """A module of which every class exists and is empty."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or not name[0].isupper():
            raise AttributeError(f"the stand-in for {self.__name__} has no {name}")
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's own files where they are wanted, stand-ins for all others."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] != "vllm":
            return None
        if fullname in _OWN:
            return importlib.util.spec_from_file_location(fullname, _file(self.root, fullname))
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        module.__dict__.update(_parts().get(spec.name, {}))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing runs in a stand-in."""


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Imports of vllm go to `_Finder`; afterwards nothing of it is left in `sys.modules`."""
    before = _take_modules()
    finder = _Finder(root)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _take_modules()
        sys.modules.update(before)


def _take_modules() -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]
    return {name: sys.modules.pop(name) for name in names}


@functools.cache
def _parts() -> dict[str, dict[str, object]]:
    """What is called of the modules that are stood in for."""
    quiet = types.SimpleNamespace(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=False)
    reasons = type("FinishReason", (), {"STOP": 0, "LENGTH": 1, "ABORT": 2})
    return {
        "vllm": {"envs": quiet},
        "vllm.distributed.kv_events": {"MEDIUM_GPU": "GPU"},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.utils": {
            "GiB_bytes": 2**30,
            "cdiv": lambda total, part: -(-total // part),
            "get_dtype_size": lambda dtype: dtype.itemsize,
            "length_from_prompt_token_ids_or_embeds": lambda tokens, _: len(tokens),
            "sha256_cbor": lambda _: b"",  # only compared with; the hash in use is `_sha256`
        },
        "vllm.v1.engine": {"FinishReason": reasons},
        "vllm.v1.utils": {"ConstantList": _View},
    }


def _sha256(value: object) -> bytes:
    """What vLLM hashes blocks with by default: SHA-256 of the pickled value."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


class _View:
    """A list that is read only."""

    __slots__ = ("_items",)

    def __init__(self, items: list[int]) -> None:
        self._items = items

    def __getitem__(self, place: Native) -> Native:
        return self._items[place]

    def __len__(self) -> int:
        return len(self._items)


if __name__ == "__main__":
    try:
        print(f"vllm {load_vllm().version} loads")
    except ImportError as error:
        print(error)
