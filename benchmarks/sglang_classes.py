"""sglang's own allocator classes, imported as they are.

Importing them imports most of sglang, and with it torch, transformers and what the extra `peers`
lists. One package is not needed: torchvision, whose image transforms are named by configurations of
vision models. Its wheels want the torch they were built for, with CUDA where torch is for CUDA, so
it is left out of the extra; where it is not installed, empty modules of its names stand in for it
during the import. Nothing that an allocator does comes near them.

Two settings are made, as sglang's server makes them: tensors are used in `torch.inference_mode`,
and on one thread (sglang leaves threads to CPU kernels that it builds; two were slower for the
calls that take long). Both last until the process ends.
"""

import functools
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import version

from swa_jax.bench.side import Native

VERSION = "0.5.23"  # what `make peers` installs
_IMAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


@dataclass(frozen=True)
class SglangClasses:
    """What is needed to make an allocator and to call it."""

    torch: Native
    swa_allocator: Native  # class SWATokenToKVPoolAllocator
    kv_pool: Native  # class SWAKVPool
    version: str

    def new_allocator(
        self,
        full_tokens: int,
        swa_tokens: int,
        page_size: int,
        *,
        need_sort: bool = False,
        device: str = "cpu",
    ) -> Native:
        """A `SWATokenToKVPoolAllocator` over a KV pool of two layers with one small head each.

        Args:
          full_tokens: slots of the full pool, a multiple of the page.
          swa_tokens: slots of the SWA pool, likewise.
          page_size: tokens in a page.
          need_sort: freed pages wait until a grant runs short, and are sorted then.
          device: of the tensors.
        """
        kv_pool = self.kv_pool(
            size=full_tokens,
            size_swa=swa_tokens,
            page_size=page_size,
            dtype=self.torch.bfloat16,
            head_num=1,
            head_dim=1,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1],
            device=device,
        )
        allocator = self.swa_allocator(
            full_tokens, swa_tokens, page_size, self.torch.bfloat16, device, kv_pool, need_sort
        )
        if device == "cpu":
            for pool in (allocator.full_attn_allocator, allocator.swa_attn_allocator):
                pool.use_triton_kernels = False  # True where a GPU is present, wherever tensors are
        return allocator


@functools.cache
def load_sglang() -> SglangClasses:
    """Imports sglang, once.

    Raises:
      ImportError: what is missing, as `missing` says it, or what sglang said of itself.
    """
    reason = missing()
    if reason:
        raise ImportError(reason)
    with warnings.catch_warnings(), without_torchvision():
        warnings.simplefilter("ignore")  # of their dependencies, of their syntax
        torch = importlib.import_module("torch")
        allocators = importlib.import_module("sglang.srt.mem_cache.allocator.swa")
        pools = importlib.import_module("sglang.srt.mem_cache.swa_memory_pool")
    torch.set_num_threads(1)
    torch.inference_mode().__enter__()
    found = version("sglang")
    return SglangClasses(torch, allocators.SWATokenToKVPoolAllocator, pools.SWAKVPool, found)


def missing() -> str:
    """Why sglang cannot be imported here, "" where it should work. Imports nothing."""
    needed = ("torch", "triton", "transformers", "sglang")
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(lacking)} (`make peers` installs them)" if lacking else ""


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Empty modules in the place of torchvision, where there is none, for an import of sglang."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    # transformers looks once whether torchvision is there, and must not find the stand-in.
    importlib.import_module("transformers.utils").is_torchvision_available()
    modules = {name: types.ModuleType(name) for name in _IMAGES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__["InterpolationMode"] = types.SimpleNamespace(BICUBIC=None)
    modules["torchvision"].__dict__["transforms"] = modules["torchvision.transforms"]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
