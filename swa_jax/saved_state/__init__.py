"""Allocator, prefix cache and KV on disk, so that a server that starts again has its cache."""

from swa_jax.saved_state.opened import open_state
from swa_jax.saved_state.state import restore_state, save_state
from swa_jax.saved_state.world import restore_world, save_world

__all__ = ("open_state", "restore_state", "restore_world", "save_state", "save_world")
