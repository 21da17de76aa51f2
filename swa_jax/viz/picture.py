"""Figures that show themselves in a notebook and become PNG files; no window, no global state."""

import io
from typing import Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 120
_TITLE_LETTER = 0.12  # inches at most


class Picture(Figure):
    """A matplotlib figure that a notebook shows, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        return as_png(self)


def new_picture(
    width: float, height: float, layout: Literal["constrained"] | None = None
) -> Picture:
    """An empty figure with a canvas that draws into memory.

    Args:
      width: inches.
      height: inches.
      layout: matplotlib's layout engine; None: places are given by hand.
    """
    picture = Picture(figsize=(width, height), dpi=DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(picture)
    return picture


def set_title(picture: Picture, text: str, left: float) -> None:
    """A title at the top, that many inches from the left."""
    width, height = picture.get_size_inches()
    text = shorten(text, int((width - left) / _TITLE_LETTER))
    picture.suptitle(text, x=left / width, y=1 - 0.12 / height, ha="left", va="top")


def as_png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    buffer = io.BytesIO()
    canvas = figure.canvas
    # A new canvas would be none of an animation's.
    canvas = canvas if isinstance(canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
    canvas.print_png(buffer)
    return buffer.getvalue()


def plain(name: str) -> str:
    """A name that can be drawn: nothing unprintable, and a dollar sign begins no formula."""
    return (name if name.isprintable() else repr(name)).replace("$", r"\$")


def shorten(name: str, most: int) -> str:
    """A name of at most so many letters."""
    return name if len(name) <= most else name[: most - 1] + "…"
