"""The laws of the host's tree, loud. For tests and for finding out what went wrong."""

from collections.abc import Iterator

from swa_jax.host_cache.index import HostIndex
from swa_jax.host_cache.nodes import NO_ROW, HostNode


def nodes_of(index: HostIndex) -> Iterator[HostNode]:
    """Every page that the index knows, parents first."""
    todo = list(index._roots.values())
    while todo:
        node = todo.pop()
        if node.parent is not None:
            yield node
        todo += node.children.values()


def check_index(index: HostIndex) -> None:
    """Raises AssertionError for the first law that does not hold.

    Rows are given out once; nothing bare stays; nobody leaves before what hangs from it; SWA rows
    wait in the order that their distance from an end says.
    """
    config, nodes = index.config, list(nodes_of(index))
    for name, spare, count in (
        ("full", index._spare_full, config.full_pages),
        ("swa", index._spare_swa, config.swa_pages),
    ):
        used = [row for node in nodes if (row := getattr(node, name)) != NO_ROW]
        assert sorted(used + spare) == list(range(count)), f"{name} rows given out twice or lost"
    place = {node: at for at, node in enumerate(index._full_order)}
    for node in nodes:
        assert not node.is_bare or node.pins, f"a bare node stays: {node.key!r}"
        assert node.pins >= 0, f"pins below 0: {node.key!r}"
        ends = [child.to_end + 1 for child in node.children.values()]
        assert node.to_end == min([*ends, config.kept_pages] if ends else [0])
        near = node.to_end < config.kept_pages
        free = not node.pins
        assert (node in place) == (free and node.full != NO_ROW)
        assert (node in index._near_order) == (free and node.swa != NO_ROW and near)
        assert (node in index._far_order) == (free and node.swa != NO_ROW and not near)
        for child in node.children.values():
            if node in place and child in place:
                assert place[child] < place[node], "a page would leave before its child"
            assert not child.pins or node.pins, "a pinned page hangs from one that may leave"
