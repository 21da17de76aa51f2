"""Types of the options of `swa-jax`: their help texts, bounds and completions. Needs typer."""

import math
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from swa_jax.choices import DEFAULT_HBM, EVENT_SLICE_STEPS, MAX_REQUESTS, PLACEMENTS, POLICIES
from swa_jax.replay.bundled import BUNDLED
from swa_jax.replay.trace_lines import show


def whole_number(most: int | None = None) -> Callable[[str | int], int]:
    """Parses 1, 2, ... up to `most`. Typer's own check of bounds does not name the value seen."""

    def parse(value: str | int) -> int:
        try:
            number = int(value)
        except ValueError:  # also for more digits than Python takes
            number = 0
        if number < 1 or (most is not None and number > most):
            wanted = "a positive integer" if most is None else f"an integer from 1 to {most}"
            raise typer.BadParameter(f"must be {wanted}, got {show(value)}")
        return number

    return parse


def one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    """Parses one of these, in the words of the other errors."""

    def parse(value: str) -> str:
        if value not in names:
            raise typer.BadParameter(f"must be one of {', '.join(names)}, got {show(value)}")
        return value

    return parse


def names_in(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes a word to those of the names that begin with it."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Completes the name of a model."""
    from swa_jax.models.configs import MODELS

    return names_in(MODELS)(incomplete)


def number_above_zero(value: str | float) -> float:
    """Parses a finite number above 0."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise typer.BadParameter(f"must be a number above 0, got {show(str(value))}")
    return number


def _gib(value: str | float) -> float:
    """A number of GiB above 0, a part of one included."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= 2**30:
        raise typer.BadParameter(f"must be a number of GiB above 0, got {show(str(value))}")
    return number


_POSITIVE = whole_number()

TraceFile = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="A trace file (Mooncake JSON lines or Azure CSV, told by content), or the bundled "
        "mooncake-conversation.",
        autocompletion=names_in(BUNDLED),
        show_default=False,
    ),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        autocompletion=model_names,
        help="A model that `swa-jax models` lists.",
    ),
]
Hbm = Annotated[
    str | None,
    typer.Option(
        "--hbm",
        metavar="SIZE",
        help="Memory for KV, split over the pools, such as 80GB or 512MiB; "
        f"{DEFAULT_HBM} if no size is given.",
    ),
]
FullTokens = Annotated[
    int | None,
    typer.Option("--full-tokens", metavar="N", parser=_POSITIVE, help="Tokens of the full pool."),
]
SwaTokens = Annotated[
    int | None,
    typer.Option(
        "--swa-tokens",
        metavar="N",
        parser=_POSITIVE,
        help="Tokens of the SWA pool; alone for a model without full layers.",
    ),
]
PageSize = Annotated[
    int,
    typer.Option(
        "--page-size", metavar="N", parser=_POSITIVE, help="Tokens of a page, in both pools."
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        metavar="N",
        parser=whole_number(MAX_REQUESTS),
        help="Only the first N requests of the file.",
    ),
]
MaxRunning = Annotated[
    int,
    typer.Option(
        "--max-running", metavar="N", parser=_POSITIVE, help="Most requests that run at once."
    ),
]
ChunkTokens = Annotated[
    int,
    typer.Option(
        "--chunk-tokens", metavar="N", parser=_POSITIVE, help="Most prompt tokens taken in a step."
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        metavar="N",
        parser=_POSITIVE,
        help="Reject requests of more than N tokens.",
    ),
]
NoPrefixCache = Annotated[
    bool,
    typer.Option(
        "--no-prefix-cache",
        help="Let no request start from what an earlier one computed. There is no cache either "
        "where the trace has no block ids or the model no full layers.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="|".join(POLICIES),
        parser=one_of(POLICIES),
        autocompletion=names_in(POLICIES),
        help="Which cached pages leave first: the least recently used (lru), the least often "
        "matched (lfu), the oldest (fifo), those of the lowest priority (as a trace gives none, "
        "lru), or those that save the least compute for their bytes, with recency (cost).",
    ),
]
HostGib = Annotated[
    float | None,
    typer.Option(
        "--host-gib",
        metavar="GIB",
        parser=_gib,
        help="GiB of host memory under the prefix cache: what it evicts goes there, and comes back "
        "for a request that begins with it.",
    ),
]
Dp = Annotated[
    int | None,
    typer.Option(
        "--dp",
        metavar="D",
        parser=whole_number(4096),
        help="Replay on D data-parallel ranks, each with pools and a prefix cache of its own: "
        "--hbm, the pools' tokens, --max-running and --chunk-tokens are of one rank.",
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(
        "--placement",
        metavar="|".join(PLACEMENTS),
        parser=one_of(PLACEMENTS),
        autocompletion=names_in(PLACEMENTS),
        help="With --dp: a request goes to the rank that has the longest prefix of it, unless that "
        "one is too busy (prefix, the default), or to each in turn (round-robin).",
    ),
]
NoCompare = Annotated[
    bool,
    typer.Option(
        "--no-compare",
        help="With --dp: do not replay the trace twice more, in turn and on one rank, for their "
        "hit rates.",
    ),
]
EventsFile = Annotated[
    str | None,
    typer.Option(
        "--events",
        metavar="FILE",
        help="Write JSON lines of stored and removed blocks (pages of the prefix cache), with the "
        f"fields of vLLM's KV events. The tree is looked at every {EVENT_SLICE_STEPS} steps: a "
        "block stored and evicted in between is not seen.",
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write all figures as JSON; - is stdout, and the table goes to stderr.",
    ),
]
PlotFile = Annotated[
    str | None,
    typer.Option(
        "--plot", metavar="FILE.png", help="Draw pages, memory and requests over the steps."
    ),
]
NoProgress = Annotated[
    bool,
    typer.Option(
        "--no-progress",
        help="No progress bar; without a terminal, no line on stderr every 10 seconds.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing unless something is wrong.")
]
