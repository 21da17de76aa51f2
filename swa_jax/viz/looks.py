"""How pages look: colours that colour-blind readers can tell apart, and a letter or pattern each.

The colours are those of Okabe and Ito. Nothing is told by colour alone: an owner has a letter of
its own, every other kind of page a letter or a hatch.
"""

from dataclasses import dataclass

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
WHITE, GREY, PALE = "#FFFFFF", "#999999", "#EEEEEE"

_OWNER_COLOURS = (ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE)
_OWNER_HATCHES = ("", "///")
MOST_OWNERS = len(_OWNER_COLOURS) * len(_OWNER_HATCHES)
OTHERS = "others"  # who stands for owners beyond that


@dataclass(frozen=True)
class Look:
    """How one kind of page is drawn."""

    label: str
    letter: str  # capitals are owners'
    colour: str
    hatch: str = ""
    mixed: str = ""  # the colour of its part of a tile, where `colour` needs the hatch beside it

    @property
    def part(self) -> str:
        """The colour of its part of a tile."""
        return self.mixed or self.colour

    @property
    def ink(self) -> str:
        """The colour in which its letter is legible."""
        red, green, blue = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5))
        return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else WHITE


# Kinds of page, as indices into a map's looks; owners come after them.
FREE, PENDING, HELD, SHARED, UNMAPPED, LEFT, STALE, ABSENT, PADDING = range(9)
FIRST_OWNER = 9


def looks_of(names: list[str]) -> list[Look]:
    """The looks of a map by kind, owners last.

    Args:
      names: of the owners, at most `MOST_OWNERS` and `OTHERS`; none where nobody is named.
    """
    held = Look("held, owner unknown", "h", "#BBBBBB") if names else Look("held", "h", SKY)
    kinds = [
        Look("free", "", WHITE),
        Look("pending until group end", "p", WHITE, "////", "#D4D4D4"),
        held,
        Look("shared by several", "s", PALE, "xxx", "#444444"),
        Look("held, not mapped", "u", "#777777", "|||"),
        Look("left its window", "w", WHITE, "...", "#E2E2E2"),
        Look("named, but not held", "!", WHITE, "ooo", BLACK),
        Look("in the other pool", "", PALE, "\\\\\\"),
        Look("padding", "0", BLACK),
    ]
    return kinds + [_owner(place, str(name)) for place, name in enumerate(names)]


def _owner(place: int, name: str) -> Look:
    if place >= MOST_OWNERS:
        return Look(name, "+", GREY, "...")
    colour = _OWNER_COLOURS[place % len(_OWNER_COLOURS)]
    return Look(name, chr(ord("A") + place), colour, _OWNER_HATCHES[place // len(_OWNER_COLOURS)])
