"""Where and when figures were taken."""

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax


def environment() -> dict[str, object]:
    """Versions, processor and load, as JSON values."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load_average": load_average(),
        "malloc": os.environ.get("GLIBC_TUNABLES"),  # large pages of memory change figures
    }


def stay_on_one_core() -> None:
    """Keeps this process on one core; to be called before JAX makes its first array.

    XLA splits what it does with a table over 512 KB among threads, which takes longer than the
    work, and how long is chance. No other side uses more than one core.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


class CompileClock:
    """Seconds that XLA spent compiling since this was made, by the name of the program.

    A program is compiled once for every shape and every pool's size.
    """

    def __init__(self) -> None:
        """Starts to listen."""
        self._seconds: dict[str, list[float]] = {}
        jax.monitoring.register_event_duration_secs_listener(self._add)

    @property
    def seconds(self) -> float:
        """Of all programs."""
        return sum(sum(each) for each in self._seconds.values())

    def programs(self) -> dict[str, dict[str, float | int]]:
        """By name, the longest first: how often it was compiled, the seconds in all, the most."""
        rows = {
            name: {"times": len(each), "seconds": round(sum(each), 3), "most": round(max(each), 3)}
            for name, each in self._seconds.items()
        }
        return dict(sorted(rows.items(), key=lambda row: -row[1]["most"]))

    def _add(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            name = str(kwargs.get("fun_name", "?"))
            self._seconds.setdefault(name, []).append(duration_secs)


def load_average() -> list[float] | None:
    """Of the last 1, 5 and 15 minutes: above the number of cores, figures are too high."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
