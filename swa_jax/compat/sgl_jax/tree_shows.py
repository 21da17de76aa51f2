"""The whole tree at a glance: printed, or as slots."""

import numpy as np

from swa_jax.compat.sgl_jax.tree_sizes import TreeSizes


class TreeShows(TreeSizes):
    """Walks of all nodes; each reads the device once."""

    def pretty_print(self) -> None:
        """Prints the tree, a node a line."""
        stack = [(0, self.root_node)]
        while stack:
            level, node = stack.pop()
            side = "full" if node.swa_tombstone else "full+swa"
            locks = f"locks {node.full_lock_ref}/{node.swa_lock_ref}"
            print(f"{'  ' * level}#{node.id}: {len(node.key or [])} tokens, {side}, {locks}")
            stack += [(level + 1, child) for child in node.children.values()]
        full, of_swa = self.total_size()
        print(f"{full} full and {of_swa} SWA tokens")

    def all_values_flatten(self) -> np.ndarray:
        """int32[T] the full slots of all nodes, a branch after the other."""
        values, stack = [np.empty(0, np.int32)], [self.root_node]
        while stack:
            node = stack.pop()
            values.append(np.asarray(node.value, np.int32))
            stack += reversed(node.children.values())
        return np.concatenate(values)
