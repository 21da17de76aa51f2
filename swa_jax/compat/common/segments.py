"""Segments: one request's slots in token order, with the token that they start at."""

import numpy as np

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.host_arrays import host_int, host_ints
from swa_jax.compat.common.types import Segments


def check_start(start_pos: int, page_size: int) -> None:
    """A segment starts where a page does.

    Raises:
      MisuseError: says where it started.
    """
    start = host_int("start_pos", start_pos)
    if start < 0 or start % page_size:
        raise MisuseError(
            f"a segment must start on a page boundary, start_pos a multiple of {page_size}, "
            f"got {start}"
        )


def disjoint(segments: Segments, page_size: int) -> list[tuple[np.ndarray, int]]:
    """The `(slots, start_pos)` segments that are not empty, looked at before any of them is freed.

    Raises:
      MisuseError: one that starts in a page of the one before it, or before that, or whose slots
        are no integers.
    """
    named = [(host_ints("free_index", slots), start) for slots, start in segments]
    found = [(slots, host_int("start_pos", start)) for slots, start in named if len(slots)]
    end_page = 0
    for slots, start in found:
        check_start(start, page_size)
        if start // page_size < end_page:
            raise MisuseError(
                f"segments must ascend and share no page of {page_size} tokens, got one from "
                f"{start} after one that reaches token {end_page * page_size}"
            )
        end_page = -(-(start + len(slots)) // page_size)
    return found


def check_row(slots: np.ndarray, first: int, page_size: int) -> None:
    """int32[T] slots of one request from its token 0 on stand as pages need them, from `first` on.

    A page goes to whoever is given one slot of it. Padding slots stand anywhere.

    Raises:
      MisuseError: a slot at another place of its page than its token, or two pages where one goes.
    """
    place = np.arange(len(slots))
    start = slots[place - place % page_size]
    wrong = (slots != start + place % page_size) | (start % page_size != 0)
    wrong &= (place >= first) & (slots >= page_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise MisuseError(
            f"slots must be those of one request in token order with page_size={page_size}; token "
            f"{at} has slot {int(slots[at])}, its page begins with slot {int(start[at])}"
        )
