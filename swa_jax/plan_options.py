"""Types of the options of `swa-jax plan`: their help texts and bounds. Needs typer."""

import math
from collections.abc import Callable
from typing import Annotated

import typer

from swa_jax.command_options import whole_number
from swa_jax.planner.loads import MODES
from swa_jax.replay.pool_options import DEFAULT_HBM
from swa_jax.replay.trace_lines import show

MOST_CANDIDATES = 256


def _above_zero(value: str | float) -> float:
    """A finite number above 0."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise typer.BadParameter(f"must be a number above 0, got {show(str(value))}")
    return number


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"must be one of {', '.join(choices)}, got {show(value)}")
        return value

    return parse


def _candidates(value: str | int) -> int:
    """At least 3: the two ends and one between."""
    number = whole_number(MOST_CANDIDATES)(value)
    if number < 3:
        raise typer.BadParameter(
            f"must be an integer from 3 to {MOST_CANDIDATES}, got {show(value)}"
        )
    return number


_POSITIVE = whole_number()

TraceFile = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="TRACE",
        help="A trace file (Mooncake JSON lines or Azure CSV, told by content), or the bundled "
        "mooncake-conversation.",
    ),
]
ChipHbm = Annotated[
    str,
    typer.Option(
        "--hbm",
        metavar="SIZE",
        help="KV memory of one chip, such as 40GiB; with --weights the memory of one chip for "
        f"both. {DEFAULT_HBM} if it is not given.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="SIZE",
        help="Bytes of the whole model's weights, and of what else a rank keeps; each chip of a "
        "rank holds an equal part, which is taken from --hbm.",
    ),
]
Chips = Annotated[int, typer.Option("--chips", metavar="N", parser=_POSITIVE, help="Chips in all.")]
Dp = Annotated[
    int,
    typer.Option(
        "--dp",
        metavar="D",
        parser=_POSITIVE,
        help="Data-parallel ranks, each with a model of its own on N / D chips that share its "
        "heads. 1: all chips serve one model together.",
    ),
]
Copies = Annotated[
    int,
    typer.Option(
        "--copies",
        metavar="K",
        parser=_POSITIVE,
        help="Serve every request of the trace so many times: a load for more ranks.",
    ),
]
Deal = Annotated[
    str,
    typer.Option(
        "--deal",
        metavar="|".join(MODES),
        parser=_one_of(MODES),
        help="Which rank a request goes to: to each in turn, or to the one that was given the "
        "fewest tokens so far.",
    ),
]
StepMs = Annotated[
    float | None,
    typer.Option(
        "--step-ms",
        metavar="MS",
        parser=_above_zero,
        help="Time of a step: requests come in when the trace says they arrive. Without it they "
        "are served as fast as memory allows.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        metavar="R",
        parser=_above_zero,
        help="Requests a second over all ranks, evenly, instead of the trace's arrival times; "
        "needs --step-ms.",
    ),
]
MaxRunning = Annotated[
    int,
    typer.Option(
        "--max-running",
        metavar="N",
        parser=_POSITIVE,
        help="Most requests that run at once on a rank.",
    ),
]
ChunkTokens = Annotated[
    int,
    typer.Option(
        "--chunk-tokens",
        metavar="N",
        parser=_POSITIVE,
        help="Most prompt tokens that a rank takes in a step.",
    ),
]
Candidates = Annotated[
    int,
    typer.Option(
        "--candidates",
        metavar="N",
        parser=_candidates,
        help="Splits that are simulated at once; a second round looks around the best of them.",
    ),
]
Confirm = Annotated[
    bool,
    typer.Option(
        "--confirm",
        help="Replay the slowest rank page by page as well, and fail where a figure differs.",
    ),
]
