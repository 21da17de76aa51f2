"""A plain host cache for hybrid prefixes: a radix tree by pages, least recently used first.

What today's engines do, in the plainest Python: a used path moves to the young end with its root
last, so eviction starts at leaves; an inner page that loses its SWA side becomes a tombstone, a
leaf leaves whole. One request at a time, nothing locked in between.
"""

from collections import OrderedDict


class Node:
    """One cached page."""

    def __init__(self, key, parent):
        """Hangs below its parent."""
        self.key, self.parent = key, parent
        self.children = {}
        self.live = True


class HostLru:
    """Counts pages, never ids."""

    def __init__(self, full_pages, swa_pages, window_pages):
        """Room for so many pages of each kind."""
        self.full_pages, self.swa_pages, self.window = full_pages, swa_pages, window_pages
        self.root = Node(None, None)
        self.order = OrderedDict()  # nodes, oldest first
        self.live = 0

    def path(self, keys):
        """Nodes of the longest cached prefix."""
        node, nodes = self.root, []
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def usable(self, nodes):
        """Pages up to the last one with a live window behind it."""
        run, best = 0, 0
        for count, node in enumerate(nodes, 1):
            run = run + 1 if node.live else 0
            if run >= min(self.window, count):
                best = count
        return best

    def touch(self, nodes):
        """Makes a path the youngest, its root last."""
        for node in reversed(nodes):
            self.order.move_to_end(node)

    def serve(self, keys):
        """Matches a prompt, then caches all of it; returns the pages that were usable."""
        hit = self.usable(self.path(keys[:-1]))  # the last page is always computed
        nodes = self.path(keys)
        self.touch(nodes)
        kept = set(nodes)
        node = nodes[-1] if nodes else self.root
        # Pages past the hit are computed, so their SWA side is there again.
        for old in nodes[hit:]:
            if not old.live:
                self.make_room(0, 1, kept)
                old.live = True
                self.live += 1
        for key in keys[len(nodes) :]:
            self.make_room(1, 1, kept)
            new = Node(key, node)
            node.children[key] = new
            self.order[new] = None
            self.live += 1
            kept.add(new)
            nodes.append(new)
            node = new
        self.touch(nodes)
        return hit

    def make_room(self, full, swa, kept):
        """Evicts the oldest until so many pages fit."""
        while len(self.order) + full > self.full_pages:
            self.remove(next(n for n in self.order if not n.children and n not in kept))
        while self.live + swa > self.swa_pages:
            window = set(list(kept)[-self.window :])
            node = next(n for n in self.order if n.live and n not in window)
            if node.children or node in kept:
                node.live = False
                self.live -= 1
            else:
                self.remove(node)

    def remove(self, node):
        """Takes a leaf out, and tombstones above it that nothing hangs from."""
        while node is not self.root and not node.children:
            parent = node.parent
            del parent.children[node.key]
            del self.order[node]
            self.live -= node.live
            node = parent
            if node.live:
                break
