"""Types of the options of `swa-jax plan`: their help texts and bounds. Needs typer."""

from typing import Annotated

import typer

from swa_jax.choices import DEALS, DEFAULT_HBM
from swa_jax.commands.options import names_in, number_above_zero, one_of, whole_number
from swa_jax.replay.bundled import BUNDLED
from swa_jax.replay.trace_lines import show

MOST_CANDIDATES = 256


def _candidates(value: str | int) -> int:
    """At least 3: the two ends and one between."""
    number = whole_number(MOST_CANDIDATES)(value)
    if number < 3:
        raise typer.BadParameter(
            f"must be an integer from 3 to {MOST_CANDIDATES}, got {show(value)}"
        )
    return number


_POSITIVE = whole_number()
_TRACE = (
    "A trace file (Mooncake JSON lines or Azure CSV, told by content), or the bundled "
    "mooncake-conversation, which is taken if none is given."
)

TraceFile = Annotated[
    str | None,
    typer.Argument(
        metavar="TRACE", help=_TRACE, autocompletion=names_in(BUNDLED), show_default=False
    ),
]
TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="TRACE",
        help="The same, as an option.",
        autocompletion=names_in(BUNDLED),
        show_default=False,
    ),
]
ChipHbm = Annotated[
    str,
    typer.Option(
        "--hbm",
        metavar="SIZE",
        help="KV memory of one chip, such as 40GiB; with --weights the memory of one chip for "
        f"both. {DEFAULT_HBM} if it is not given.",
        show_default=False,
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
        metavar="|".join(DEALS),
        parser=one_of(DEALS),
        autocompletion=names_in(DEALS),
        help="Which rank a request goes to: to each in turn, or to the one that was given the "
        "fewest tokens so far.",
    ),
]
StepMs = Annotated[
    float | None,
    typer.Option(
        "--step-ms",
        metavar="MS",
        parser=number_above_zero,
        help="Time of a step: requests come in when the trace says they arrive. Without it they "
        "are served as fast as memory allows.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        metavar="R",
        parser=number_above_zero,
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
