"""Independent allocators and caches, one a data-parallel rank, on one device or over many.

A rank is an entry of a leading axis: `new_ranks` makes the states, `each_rank` carries any
transition over to all of them at once, and nothing that one rank does reads another's. `loads` is
the view of all ranks that a router needs, `place` chooses one for a request.
"""

from swa_jax.data_parallel.each_rank import each_rank, new_ranks, one_rank
from swa_jax.data_parallel.placement import Loads, Placement, loads, place

__all__ = ["Loads", "Placement", "each_rank", "loads", "new_ranks", "one_rank", "place"]
