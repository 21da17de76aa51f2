"""A page map that moves: how pages come, leave the window, and go to somebody else."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.animation import FuncAnimation
from matplotlib.artist import Artist

from swa_jax.replay.outfile import OutFile
from swa_jax.state import AllocatorState
from swa_jax.viz.looks import looks_of
from swa_jax.viz.map_figure import (
    blank_map,
    clear_map,
    draw_map,
    layout_of,
    legend_of,
    set_map_title,
)
from swa_jax.viz.picture import DPI, Picture, plain, shorten
from swa_jax.viz.pool_view import HostOwners, Owners, choose_names, host_owners, view_state

_MOST_CAPTION = 110  # letters


class WindowAnimation(FuncAnimation):
    """An animation that a notebook plays.

    Attributes:
      picture: the figure that is drawn into.
      draw: draws a frame by its number.
    """

    def __init__(
        self, picture: Picture, draw: Callable[[int], list[Artist]], frames: int, frame_ms: int
    ) -> None:
        """As `window_animation` calls it."""
        self.picture, self.draw = picture, draw
        super().__init__(
            picture, draw, frames=frames, init_func=list, interval=frame_ms, repeat=True
        )

    def _repr_html_(self) -> str:
        return self.to_jshtml()


def window_animation(
    states: Sequence[AllocatorState],
    owners: Owners | Sequence[Owners] | None = None,
    *,
    rings: Owners | Sequence[Owners] | None = None,
    captions: Sequence[str] | None = None,
    frame_ms: int = 400,
    title: str | None = None,
) -> WindowAnimation:
    """A page map for each state, one after the other.

    Args:
      states: of one configuration, in order. Waits for the device.
      owners: as for `page_map`, for all states, or one for each.
      rings: likewise.
      captions: a line for each state.
      frame_ms: how long each is seen, milliseconds.
      title: above it all; the sizes by default.

    Returns:
      A matplotlib animation: `save_animation` writes it, a notebook plays it.

    Raises:
      ValueError: no states, states of several configurations, lists of other lengths, or what
        `page_map` refuses.
    """
    states = list(states)
    if not states:
        raise ValueError("states must hold at least one state, got none")
    if any(state.config != states[0].config for state in states):
        raise ValueError("states must have one configuration, or their pages are not the same")
    each = _one_each("owners", owners, len(states))
    each_rings = _one_each("rings", rings, len(states))
    words = _lines(captions, len(states))
    if isinstance(frame_ms, bool) or not isinstance(frame_ms, int) or frame_ms < 1:
        raise ValueError(f"frame_ms must be a positive integer of milliseconds, got {frame_ms!r}")
    names = choose_names([*each, *each_rings])
    views = [
        view_state(state, of_state, of_rings, names)
        for state, of_state, of_rings in zip(states, each, each_rings, strict=True)
    ]
    layout, looks = layout_of(states[0].config), looks_of(names)
    entries = legend_of(views, layout, looks, counts=False)
    picture, axes = blank_map(layout, entries)
    height = max(axes.get_ylim())

    def draw(frame: int) -> list[Artist]:
        clear_map(axes, height)
        draw_map(axes, views[frame], layout, looks)
        axes.text(0, 0, shorten(plain(words[frame]), _MOST_CAPTION), va="top", fontsize=9)
        return []

    set_map_title(picture, title, states[0].config)
    return WindowAnimation(picture, draw, len(states), frame_ms)


def _one_each(name: str, owners: Owners | Sequence[Owners] | None, count: int) -> list[HostOwners]:
    if owners is None or isinstance(owners, Mapping):
        return [host_owners(name, owners)] * count
    each = [host_owners(name, one) for one in owners]
    if len(each) != count:
        raise ValueError(f"{name} must be one for each of the {count} states, got {len(each)}")
    return each


def _lines(captions: Sequence[str] | None, count: int) -> list[str]:
    if captions is None:
        return [f"{at + 1} of {count}" for at in range(count)]
    if len(captions) != count:
        raise ValueError(f"captions must be one for each of {count} states, got {len(captions)}")
    return list(captions)


def save_animation(animation: FuncAnimation, path: str | os.PathLike[str]) -> None:
    """Writes an animation as a GIF, whole or not at all.

    Args:
      animation: of `window_animation`.
      path: a file that ends in .gif; what is there is replaced.

    Raises:
      ValueError: another ending, or a file that cannot be written.
    """
    name = os.fspath(path)
    if not name.lower().endswith(".gif"):
        raise ValueError(f"path must end in .gif, got {name}")
    OutFile("path", name).write(as_gif(animation))


def as_gif(animation: FuncAnimation) -> bytes:
    """An animation as a GIF file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "animation.gif"
        animation.save(file, writer="pillow", dpi=DPI)
        return file.read_bytes()
