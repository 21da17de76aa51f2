"""Words for what callers pass and get, which only NumPy could tell apart."""

from typing import Any, TypeAlias

HostInts: TypeAlias = Any  # int[...]: a NumPy array, a list, or what `np.asarray` takes
Slots: TypeAlias = Any  # int[T] slots as the interface hands them out
Cache: TypeAlias = Any  # a KV cache, of which only the attributes named are used
Segments: TypeAlias = Any  # a list of (int[T] slots, start position)
Plain: TypeAlias = Any  # whatever the callee takes
