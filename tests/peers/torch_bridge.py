"""`swa_jax.compat.sglang` with torch tensors out, to run sglang's own tests on it.

For tests alone: the package knows nothing of torch.
"""

import importlib

import numpy as np

from swa_jax.compat import sglang
from swa_jax.compat.common.mapping_view import MappingView
from swa_jax.compat.common.swa_shell import mapping_views


def as_tensor(slots):
    torch = importlib.import_module("torch")  # only where it is called: it need not be installed
    return torch.from_numpy(np.array(slots, np.int64))


class TensorView(MappingView):
    """The mapping as torch functions and methods take it: a tensor, of now."""

    def tensor(self):
        return as_tensor(np.asarray(self))

    def _read(self, places):
        return as_tensor(super()._read(np.asarray(places)))

    def __array__(self, dtype=None, copy=None):
        return super()._read(np.arange(len(self))).astype(dtype or self.dtype)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __eq__(self, other):
        return self.tensor() == other

    def __gt__(self, other):
        return self.tensor() > other

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function, _types, args=(), kwargs=None):
        def plain(value):
            if isinstance(value, (list, tuple)):
                return type(value)(plain(part) for part in value)
            return value.tensor() if isinstance(value, TensorView) else value

        return function(*plain(args), **{k: plain(v) for k, v in (kwargs or {}).items()})


class _Tensors:
    def _out(self, slots):
        return as_tensor(slots)


class TokenToKVPoolAllocator(_Tensors, sglang.TokenToKVPoolAllocator):
    pass


class PagedTokenToKVPoolAllocator(_Tensors, sglang.PagedTokenToKVPoolAllocator):
    pass


class SWATokenToKVPoolAllocator(_Tensors, sglang.SWATokenToKVPoolAllocator):
    def _make_mapping(self):
        view = mapping_views(self)[0]
        return TensorView(self.pools, 0, view.tokens, np.int64, ends_with_no_location=True)


class PureSWATokenToKVPoolAllocator(_Tensors, sglang.PureSWATokenToKVPoolAllocator):
    pass
