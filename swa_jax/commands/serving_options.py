"""Types of the options of `swa-jax generate` and `swa-jax serve-http`. Needs typer."""

import math
from collections.abc import Callable
from typing import Annotated

import typer

from swa_jax.commands.options import names_in, one_of, whole_number
from swa_jax.replay.trace_lines import show

DTYPES = ("float32", "bfloat16")
DRAFTS = ("ngram",)


def _from_to(least: int, most: int) -> Callable[[str | int], int]:
    """Parses an integer between bounds."""

    def parse(value: str | int) -> int:
        try:
            number = int(value)
        except ValueError:  # also for more digits than Python takes
            number = least - 1
        if not least <= number <= most:
            raise typer.BadParameter(
                f"must be an integer from {least} to {most}, got {show(value)}"
            )
        return number

    return parse


def _number(least: float, most: float) -> Callable[[str | float], float]:
    """Parses a number between bounds."""

    def parse(value: str | float) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise typer.BadParameter(f"must be from {least:g} to {most:g}, got {show(value)}")
        return number

    return parse


_POSITIVE = whole_number()

Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Directory with config.json, safetensors and tokenizer.json: Gemma 3 or gpt-oss.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="|".join(DTYPES),
        parser=one_of(DTYPES),
        autocompletion=names_in(DTYPES),
        help="Of parameters and KV.",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="Text to continue; give it several times for several. Without it: all of stdin.",
        show_default=False,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        metavar="N",
        parser=_POSITIVE,
        help="Most tokens generated for a prompt.",
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        metavar="X",
        parser=_number(0, 100),
        help="0 takes the likeliest token; the higher, the more is left to chance.",
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        metavar="K",
        parser=_from_to(0, 2**31 - 1),
        help="Draw among the K likeliest tokens; 0: among all.",
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        parser=_number(1e-6, 1),
        help="Draw among the likeliest tokens that add up to P.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        parser=_from_to(0, 2**31 - 1),
        help="Chooses what is drawn, for the first prompt; each further one has the next number.",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="|".join(DRAFTS),
        parser=one_of(DRAFTS),
        autocompletion=names_in(DRAFTS),
        help="Speculate on tokens: out of the text itself (ngram). Changes no output.",
    ),
]
NoPrefixCache = Annotated[
    bool,
    typer.Option("--no-prefix-cache", help="Compute every prompt, whatever was computed before."),
]
ServedHbm = Annotated[
    str | None,
    typer.Option(
        "--hbm",
        metavar="SIZE",
        help="Memory for KV, split over the pools, such as 80GB or 512MiB. Without any size: "
        "1GiB, or less where that is more than could be of use.",
    ),
]
NeededHbm = Annotated[
    str | None,
    typer.Option(
        "--hbm",
        metavar="SIZE",
        help="Memory for KV, split over the pools, such as 80GB or 512MiB. Without any size: as "
        "much as the prompts need that run at once.",
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write texts, tokens and figures as JSON; - is stdout, without the plain texts.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the texts, but no figures.")]
Host = Annotated[
    str, typer.Option("--host", metavar="HOST", help="Address to listen on; 0.0.0.0: on all.")
]
Port = Annotated[
    int,
    typer.Option(
        "--port", metavar="N", parser=_from_to(0, 65535), help="Port to listen on; 0: any free one."
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model-name",
        metavar="NAME",
        help="What clients call the model; by default the checkpoint directory's name.",
    ),
]
ServedContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        metavar="N",
        parser=_POSITIVE,
        help="Most tokens of a request, prompt and output; by default what model and pool allow.",
    ),
]
MaxWaiting = Annotated[
    int,
    typer.Option(
        "--max-waiting",
        metavar="N",
        parser=_from_to(0, 2**20),
        help="Requests that may wait beyond those that run; more are told to come again (429).",
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        metavar="N",
        parser=_from_to(1, 1024),
        help="Steps of the loop between two looks for new requests and new tokens.",
    ),
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Keep the prefix cache in this directory when the server stops, and start with what "
        "it has. The pools must be the same then.",
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        metavar="SECONDS",
        parser=_number(0, 86400),
        help="How long running requests may still take after SIGTERM or Ctrl-C.",
    ),
]
