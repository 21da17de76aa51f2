"""A plain radix cache in Python: what a host engine does for each request, without frills."""

from collections import OrderedDict


class Node:
    """One cached page."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, key: bytes, page: int, parent: "Node | None") -> None:
        """Holds `page` for the tokens of `key` after its parent's."""
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[bytes, Node] = {}


class HostTree:
    """Pages keyed by their tokens' bytes under their parent; least recently used leaves first."""

    def __init__(self, pages: int, page_size: int) -> None:
        """All pages free."""
        self.page_bytes = page_size * 4
        self.free = list(range(pages, 0, -1))
        self.root = Node(b"", 0, None)
        self.order: OrderedDict[Node, None] = OrderedDict()

    def _pages(self, tokens: bytes) -> list[bytes]:
        step = self.page_bytes
        return [tokens[at : at + step] for at in range(0, len(tokens) // step * step, step)]

    def match(self, tokens: bytes) -> list[Node]:
        """Nodes of the longest cached prefix, made the youngest."""
        node, path = self.root, []
        for key in self._pages(tokens):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        for used in reversed(path):
            self.order.move_to_end(used)
        return path

    def insert(self, tokens: bytes, pages: list[int]) -> int:
        """Caches a prompt whose pages are given; pages cached already go back. Returns those."""
        keys = self._pages(tokens)
        path = self.match(tokens)
        self.free.extend(pages[: len(path)])
        node = path[-1] if path else self.root
        fresh = []
        for key, page in zip(keys[len(path) :], pages[len(path) :], strict=False):
            child = Node(key, page, node)
            node.children[key] = child
            fresh.append(child)
            node = child
        for new in reversed(fresh):
            self.order[new] = None
        for old in reversed(path):
            self.order.move_to_end(old)
        return len(path)

    def evict(self, count: int) -> int:
        """Frees up to `count` pages of the oldest leaves. Returns how many."""
        gone = 0
        while gone < count and self.order:
            node = next(node for node in self.order if not node.children)
            while gone < count and node.parent is not None and not node.children:
                del node.parent.children[node.key]
                del self.order[node]
                self.free.append(node.page)
                node = node.parent
                gone += 1
        return gone
