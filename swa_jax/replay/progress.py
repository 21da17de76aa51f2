"""How far a replay is, on the terminal."""

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from swa_jax.config import PoolConfig

if TYPE_CHECKING:
    from swa_jax.replay.driver import Sample


class ReplayProgress:
    """A bar on stderr: finished requests, those that run now, the most that each pool held.

    Called with each `Sample`. Use it in a `with` statement; the bar goes when it ends.
    """

    def __init__(self, requests: int, pool: PoolConfig) -> None:
        """`requests` in all, replayed on `pool`."""
        self._pool, self._peak_full, self._peak_swa = pool, 0, 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        # The first slice takes long and reports nothing: the program is being compiled.
        self._task = self._bar.add_task("compiling", total=requests, figures="")

    def __enter__(self) -> "ReplayProgress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, sample: "Sample") -> None:
        """Shows `sample`."""
        self._peak_full = max(self._peak_full, sample.full_pages)
        self._peak_swa = max(self._peak_swa, sample.swa_pages)
        peaks = f"SWA {_percent(self._peak_swa, self._pool.swa_pages)}"
        if not self._pool.pure_swa_pool:
            peaks = f"full {_percent(self._peak_full, self._pool.full_pages)}, {peaks}"
        self._bar.update(
            self._task,
            description="replaying",
            completed=sample.completed + sample.rejected,
            figures=f"{sample.running} running, peak {peaks}",
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"
