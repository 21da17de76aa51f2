"""What other caches of the interface can do and this one cannot."""

from typing import NoReturn

from swa_jax.compat.sgl_jax.tree_node import TreeNode


class NoOtherTier:
    """Says no for a recurrent state, a host tier and collected events."""

    def supports_recurrent(self) -> bool:
        """No recurrent state is kept."""
        return False

    def recurrent_extra_buffer_active(self) -> bool:
        """No recurrent state is kept."""
        return False

    def take_events(self) -> list:
        """None are collected here: see `swa_jax.prefix_cache.events`."""
        return []

    def init_load_back(self, last_host_node: TreeNode, host_hit_length: int) -> NoReturn:
        """There is no host tier."""
        raise NotImplementedError("no host tier: see swa_jax.host_cache")

    def ready_to_load_host_cache(self) -> NoReturn:
        """There is no host tier."""
        raise NotImplementedError("no host tier: see swa_jax.host_cache")

    def check_hicache_events(self) -> NoReturn:
        """There is no host tier."""
        raise NotImplementedError("no host tier: see swa_jax.host_cache")
