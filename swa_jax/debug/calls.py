"""What can be recorded: every transition of `swa_jax`, by the kinds of its arguments."""

import inspect
from dataclasses import dataclass
from enum import Enum

import swa_jax as swa


class Kind(Enum):
    """What an argument is, and so how it is written down."""

    NUMBER = "an int32 number"
    NUMBERS = "a list of int32 numbers"
    SLOTS = "a list of full slots"
    SWA_SLOTS = "a list of SWA slots"
    RINGS = "a list of rings"
    TABLE = "a list of equally long lists of full slots"
    MARKS = "a list of true and false"
    STATIC = "an integer known before tracing"
    STATE = "the number of an earlier state: how many calls came before it"
    OWNERS = "an owner's id, or a list of one for each place"


LISTS = (Kind.NUMBERS, Kind.SLOTS, Kind.SWA_SLOTS, Kind.RINGS)
CAN_BE_GIVEN = (Kind.SLOTS, Kind.SWA_SLOTS, Kind.RINGS, Kind.TABLE)


def names_values(kind: Kind, value: object) -> bool:
    """Whether an argument of a program is one list of values."""
    return kind in LISTS or (kind is Kind.OWNERS and not isinstance(value, int))


@dataclass(frozen=True)
class CallKind:
    """A transition as a program knows it.

    Args:
      arguments: kind by name, in the order of the call, the state left out.
      optional: names that may be left out; the transition's default then holds.
      gives: how its answer is read: "slots" of a `Grant`, "rings" of a `RingGrant`, "copies" of
        `PageCopies`, "evicted" of `free_out_of_window`; None where it gives the state alone.
      renamed: argument of the transition by the name that a program has for it.
    """

    arguments: dict[str, Kind]
    optional: tuple[str, ...] = ()
    gives: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def hands_out(self) -> bool:
        """Whether later calls can name what it gave."""
        return self.gives in ("slots", "rings", "copies")


_ROWS = {"prefix_lens": Kind.NUMBERS, "seq_lens": Kind.NUMBERS, "last_loc": Kind.SLOTS}
_STEP = {"seq_lens": Kind.NUMBERS, "last_loc": Kind.SLOTS, "active": Kind.MARKS}
_SLOTS = {"slots": Kind.SLOTS}
_BY = {"by": Kind.OWNERS}
_FREES = CallKind({**_SLOTS, **_BY}, ("by",))
# An earlier state is `owner` to `free_swa`. In a program an owner is who holds a page.
AS_OF = "as_of"

CALLS: dict[str, CallKind] = {
    "alloc": CallKind(
        {"num_tokens": Kind.NUMBER, "capacity": Kind.STATIC, **_BY}, ("by",), gives="slots"
    ),
    "alloc_extend": CallKind({**_ROWS, "capacity": Kind.STATIC, **_BY}, ("by",), gives="slots"),
    "alloc_extend_swa_tail": CallKind(
        {**_ROWS, "swa_tail_lens": Kind.NUMBERS, "capacity": Kind.STATIC, **_BY},
        ("by",),
        gives="slots",
    ),
    "alloc_decode": CallKind({**_STEP, **_BY}, ("active", "by"), gives="slots"),
    "free": _FREES,
    "free_swa": CallKind(
        {**_SLOTS, AS_OF: Kind.STATE, **_BY}, (AS_OF, "by"), renamed=((AS_OF, "owner"),)
    ),
    "free_full": _FREES,
    "free_segment": _FREES,
    "free_swa_segment": _FREES,
    "free_swa_grouped": _FREES,
    "free_group_begin": CallKind({}),
    "free_group_end": CallKind({}),
    "free_out_of_window": CallKind(
        {
            "req_to_token": Kind.TABLE,
            "seq_lens": Kind.NUMBERS,
            "evicted_lens": Kind.NUMBERS,
            "insert_lens": Kind.NUMBERS,
            "active": Kind.MARKS,
            "max_pages": Kind.STATIC,
            "stride": Kind.STATIC,
            **_BY,
        },
        ("insert_lens", "active", "max_pages", "stride", "by"),
        gives="evicted",
    ),
    "set_full_to_swa_mapping": CallKind(
        {"full_slots": Kind.SLOTS, "swa_slots": Kind.SWA_SLOTS, **_BY}, ("by",)
    ),
    "clear_full_to_swa_mapping": CallKind({"full_slots": Kind.SLOTS, **_BY}, ("by",)),
    "share": CallKind({**_SLOTS, "live": Kind.MARKS, **_BY}, ("live", "by")),
    "copy_on_write": CallKind({**_STEP, **_BY}, ("active", "by"), gives="copies"),
    "hand_over": CallKind({**_SLOTS, "to": Kind.OWNERS, **_BY}, ("by",)),
    "rebalance": CallKind({"full_pages": Kind.NUMBER, "swa_pages": Kind.NUMBER}),
    "ring_acquire": CallKind(
        {"rings": Kind.RINGS, "active": Kind.MARKS, **_BY}, ("active", "by"), gives="rings"
    ),
    "ring_release": CallKind({"rings": Kind.RINGS, **_BY}, ("by",)),
    "clear": CallKind({}),
}
# No transition: what another bug, or a caller that kept stale notes, left in the mapping. The laws
# of a state count again from where a later call has mended it.
DAMAGE = "damage_mapping"
CALLS[DAMAGE] = CallKind({"full_slots": Kind.SLOTS, "swa_slots": Kind.SWA_SLOTS})
# They take a state and give one, and change nothing.
COPIES = ("snapshot",)


def is_transition(name: str) -> bool:
    """Whether a public name of `swa_jax` takes a state and gives one back."""
    call = getattr(swa, name)
    if inspect.isclass(call) or not callable(call) or name in COPIES:
        return False
    signature = inspect.signature(call)
    takes = list(signature.parameters)[:1] == ["state"]
    return takes and "AllocatorState" in str(signature.return_annotation)
