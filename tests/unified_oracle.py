"""A unified budget in plain Python: whose every block is, and which of its pages are held."""

from dataclasses import dataclass, field


@dataclass
class Side:
    """One pool: pages by id, and in which block they lie."""

    per_block: int
    blocks: set[int]
    held: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)

    def pages(self, block):
        return set(range(block * self.per_block + 1, (block + 1) * self.per_block + 1))

    def present(self):
        return set().union(*(self.pages(block) for block in self.blocks))

    def free(self):
        return self.present() - self.held - self.pending

    def free_blocks(self):
        free = self.free()
        return {block for block in self.blocks if self.pages(block) <= free}


class Budget:
    """Both pools, and the rule of who gives how many blocks."""

    def __init__(self, layout):
        self.layout = layout
        first = layout.first_full_blocks
        self.full = Side(layout.full_pages, set(range(first)))
        self.swa = Side(layout.swa_pages, set(range(first, layout.blocks)))

    def moves(self, full_pages, swa_pages):
        """Blocks that go to the full pool (below 0: to the SWA pool)."""
        for sign, to, wanted, source, kept in (
            (1, self.full, full_pages, self.swa, swa_pages),
            (-1, self.swa, swa_pages, self.full, full_pages),
        ):
            lacking = max(wanted, 0) - len(to.free())
            spare = len(source.free()) - max(kept, 0)
            if lacking > 0:
                blocks = min(-(-lacking // to.per_block), max(spare, 0) // source.per_block)
                return sign * min(blocks, len(source.free_blocks()))
        return 0

    def reachable(self, kind):
        """Pages that one pool could grant if the other gave all it can."""
        side, other = (self.full, self.swa) if kind == "full" else (self.swa, self.full)
        return len(side.free()) + len(other.free_blocks()) * side.per_block
