"""How far a replay is, in the words of a command's progress."""

from typing import TYPE_CHECKING

from swa_jax.commands.progress import Shown
from swa_jax.config import PoolConfig

if TYPE_CHECKING:
    from swa_jax.replay.driver import Sample


class ReplayProgress:
    """Finished requests, those that run now, the most that each pool held. Takes each `Sample`."""

    def __init__(self, requests: int, pool: PoolConfig, shown: Shown) -> None:
        """Tells `shown` of `requests` in all that are replayed on `pool`."""
        self._requests, self._pool, self._shown = requests, pool, shown
        self._peak_full = self._peak_swa = 0
        # The first slice takes long and reports nothing: the program is being compiled.
        shown("compiling")

    def __call__(self, sample: "Sample") -> None:
        """Shows `sample`."""
        self._peak_full = max(self._peak_full, sample.full_pages)
        self._peak_swa = max(self._peak_swa, sample.swa_pages)
        peaks = f"SWA {_percent(self._peak_swa, self._pool.swa_pages)}"
        if not self._pool.pure_swa_pool:
            peaks = f"full {_percent(self._peak_full, self._pool.full_pages)}, {peaks}"
        self._shown(
            "replaying requests",
            sample.completed + sample.rejected,
            self._requests,
            f"{sample.running} running, peak {peaks}",
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"
