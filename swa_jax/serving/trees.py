"""What the loop passes on without looking into it."""

from typing import Any, TypeAlias

Tree: TypeAlias = Any  # a pytree of arrays, or None
