"""What a call may name where pages carry owner tags, worked out on the host."""

from dataclasses import replace

import numpy as np

from swa_jax.debug.play import Step
from swa_jax.owners import ANYONE, TREE_OWNER

# They find pages otherwise than by their slots alone, and their rules are not told here.
_BY_OTHER_WAYS = ("free_out_of_window", "set_full_to_swa_mapping", "ring_release")
_SEGMENTS = ("free_segment", "free_swa_segment")


def own_arguments(step: Step, holders: np.ndarray) -> tuple[Step | None, int]:
    """The call with padding for pages of other owners, and how many pages those are.

    Args:
      step: any call.
      holders: int32[F+1] of the full pages before it.

    Returns:
      The call, None where what it may name cannot be told here; and the count.
    """
    tags = step.before.owner_tags
    if tags is None:
        return step, 0
    if step.call.name in _BY_OTHER_WAYS or "as_of" in step.arguments:
        return None, 0
    name = next((name for name in ("slots", "full_slots") if name in step.arguments), None)
    if name is None:
        return step, 0
    slots, size = np.array(step.arguments[name]), step.before.config.page_size
    by = np.broadcast_to(step.arguments.get("by", 0), slots.shape)
    several, alone, foreign = np.asarray(tags.full), np.asarray(tags.heir), set()
    for place in range(0, slots.size, size if step.call.name in _SEGMENTS else 1):
        page = int(slots[place]) // size
        if slots[place] < size or page >= alone.size or holders[page] <= 0:
            continue
        owner = several[page] if holders[page] > 1 else alone[page]
        anybodys = step.call.name == "share" and alone[page] == TREE_OWNER
        if owner not in (by[place], ANYONE) and not anybodys:
            foreign.add(page)
            slots[place] = 0
    return replace(step, arguments={**step.arguments, name: slots}), len(foreign)
