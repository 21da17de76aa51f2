"""What `swa-jax viz` does with what it was asked for."""

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np

from swa_jax.commands.output import JsonOutput, emit
from swa_jax.commands.progress import show_progress
from swa_jax.commands.replay_run import Sizes
from swa_jax.commands.viz_sources import Asked, Seen, Serving, example_pools, example_tree, look
from swa_jax.models import get_model
from swa_jax.replay.interruptible import interruptible
from swa_jax.replay.outfile import OutFile
from swa_jax.replay.progress import ReplayProgress
from swa_jax.replay.report import as_dict as replay_figures
from swa_jax.replay.session import run_session
from swa_jax.replay.trace import load_trace
from swa_jax.state_summary import as_dict, summarize
from swa_jax.viz.animation import as_gif, window_animation
from swa_jax.viz.examples import moving_window
from swa_jax.viz.looks import FIRST_OWNER, looks_of
from swa_jax.viz.map_figure import draw_view
from swa_jax.viz.over_time import use_over_time
from swa_jax.viz.picture import Picture
from swa_jax.viz.pool_view import StateView, view_state
from swa_jax.viz.tree_figure import draw_tree_view
from swa_jax.viz.tree_view import FULL_LOCKED, SWA_LOCKED, TOMBSTONE, stretches, view_tree

__all__ = ("Asked", "Drawn", "Film", "Serving", "Sizes")
MOST_RUNS = 10_000  # that the figures list of a pool
_KINDS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Drawn:
    """Where the results go."""

    out: str
    json: str | None
    quiet: bool
    no_progress: bool


@dataclass(frozen=True)
class Film:
    """The film of a window."""

    steps: int
    page_size: int
    window: int
    frame_ms: int


class _Output:
    """The files, known to be writable before the work begins."""

    def __init__(self, drawn: Drawn, kinds: tuple[str, ...], source: str | None = None) -> None:
        self.drawn = drawn
        reads = {} if source is None else {"the source": source}
        self.json = JsonOutput(drawn.json, reads=reads)
        self.file = OutFile("--out", drawn.out)
        self.kind = Path(drawn.out).suffix.lower()
        if self.kind not in kinds:
            raise ValueError(f"--out must end in {' or '.join(kinds)}, got {drawn.out}")
        if source is not None and self.file.same_file(source):
            raise ValueError(f"--out would overwrite the source {source}; name another file")
        if self.json.file is not None and self.json.file.same_file(self.file.path):
            raise ValueError(f"--json and --out both name {drawn.out}; name two files")

    def write(self, content: bytes, figures: dict[str, object], text: str) -> None:
        """Writes picture and figures, and says what they show."""
        self.file.write(content)
        self.json.write({"ok": True, "out": self.drawn.out, **figures})
        if not self.drawn.quiet:
            emit(f"{text}\n{self.drawn.out}: {len(content):,} bytes\n", self.json.stream)

    def draw(self, picture: Picture) -> bytes:
        """The picture as a file of the kind that was asked for."""
        buffer = io.BytesIO()
        with _same_bytes():
            picture.savefig(buffer, format=self.kind[1:], metadata=_NO_DATE[self.kind])
        return buffer.getvalue()


_NO_DATE = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


@contextlib.contextmanager
def _same_bytes() -> Iterator[None]:
    """Equal pictures are equal files."""
    with mpl.rc_context({"svg.hashsalt": "swa_jax"}):
        yield


def draw_pools(asked: Asked, serving: Serving, sizes: Sizes, drawn: Drawn) -> None:
    """Draws both pools of a state.

    Raises:
      ValueError: what was asked for cannot be done.
    """
    out = _Output(drawn, _KINDS, asked.source)
    seen = _look(asked, serving, sizes, drawn, example_pools)
    view = view_state(seen.state, seen.owners)
    out.write(out.draw(draw_view(view, seen.title)), pool_figures(view), repr(seen.state))


def pool_figures(view: StateView) -> dict[str, object]:
    """What a page map shows, ready for JSON.

    Returns:
      The counts of the state, pages by owner, and for each pool its pages in runs that are alike;
      None for a pool of more than `MOST_RUNS`.
    """
    looks = looks_of(list(view.names))
    owners: dict[str, dict[str, int]] = {name: {} for name in view.names}
    pages: dict[str, list[dict[str, object]] | None] = {}
    for name, pool in view.pools():
        kind = pool.kind[1:]  # without the padding page
        starts = np.flatnonzero(np.diff(kind, prepend=-1))
        ends = np.append(starts[1:], kind.size)
        runs = zip(starts.tolist(), ends.tolist(), kind[starts].tolist(), strict=True)
        pages[name.lower()] = None
        if starts.size <= MOST_RUNS:
            pages[name.lower()] = [
                {"first": first + 1, "last": last, "what": looks[one].label}
                for first, last, one in runs
            ]
        for place, owner in enumerate(view.names):
            count = int(np.count_nonzero(kind == FIRST_OWNER + place))
            owners[owner][f"{name.lower()}_pages"] = count
    return {"state": as_dict(view.summary), "owners": owners, "pages": pages}


def draw_tree(asked: Asked, serving: Serving, sizes: Sizes, drawn: Drawn) -> None:
    """Draws the prefix tree beside a state.

    Raises:
      ValueError: what was asked for cannot be done, or there is no tree.
    """
    out = _Output(drawn, _KINDS, asked.source)
    seen = _look(asked, serving, sizes, drawn, example_tree)
    if seen.cache is None:
        raise ValueError(f"there is no prefix tree in {asked.source}: {seen.no_cache}")
    view = view_tree(seen.cache, seen.state)
    figures = {
        "pages": int(view.page.size),
        "tombstones": int(np.count_nonzero(view.kind == TOMBSTONE)),
        "full_locked": int(np.count_nonzero(view.lock >= FULL_LOCKED)),
        "swa_locked": int(np.count_nonzero(view.lock == SWA_LOCKED)),
        "ends": view.rows,
        "deepest": int(view.depth.max(initial=0)),
        "stretches": [
            {
                "row": piece.row,
                "first": piece.first,
                "pages": piece.pages,
                "tombstones": piece.kind == TOMBSTONE,
                "lock": (None, "full", "full and SWA")[piece.lock],
            }
            for piece in stretches(view)
        ],
    }
    out.write(out.draw(draw_tree_view(view, seen.title)), figures, repr(seen.cache))


def draw_timeline(asked: Asked, serving: Serving, sizes: Sizes, drawn: Drawn) -> None:
    """Replays a trace and draws its course.

    Raises:
      ValueError: what was asked for cannot be done.
    """
    assert asked.source is not None
    out = _Output(drawn, _KINDS, asked.source)
    model, trace = get_model(asked.model), load_trace(asked.source, asked.limit)
    settings = serving.settings()
    pool = sizes.pool(model, settings, trace)
    with show_progress(wanted=not (drawn.quiet or drawn.no_progress)) as shown:
        progress = ReplayProgress(len(trace), pool, shown)
        run = interruptible(lambda: run_session(trace, model, pool, settings, progress))
    samples = [vars(sample) for sample in run.result.timeline]
    figures = replay_figures(run) | {"samples": samples}
    text = f"{len(samples):,} samples of {run.result.steps:,} steps"
    out.write(out.draw(use_over_time(run)), figures, text)


def draw_window(film: Film, drawn: Drawn) -> None:
    """Draws a film of a moving window.

    Raises:
      ValueError: what was asked for cannot be done.
    """
    out = _Output(drawn, (".gif",))
    moments = moving_window(film.steps, film.page_size, film.window)
    with show_progress(wanted=not (drawn.quiet or drawn.no_progress)) as shown:
        shown(f"drawing {len(moments)} frames")
        film_of_it = as_gif(
            window_animation(
                [moment.state for moment in moments],
                [moment.owners for moment in moments],
                captions=[moment.caption for moment in moments],
                frame_ms=film.frame_ms,
            )
        )
    frames = [
        {"caption": moment.caption, "state": as_dict(summarize(moment.state))} for moment in moments
    ]
    out.write(film_of_it, {"frames": frames}, f"{len(frames):,} frames")


def _look(
    asked: Asked, serving: Serving, sizes: Sizes, drawn: Drawn, example: Callable[[], Seen]
) -> Seen:
    with show_progress(wanted=not (drawn.quiet or drawn.no_progress)) as shown:
        return look(asked, serving, sizes, example, shown)
