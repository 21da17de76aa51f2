"""`swa-jax bench`: how long the transitions take on this device."""

import sys
from typing import Annotated

import typer

from swa_jax.commands import options
from swa_jax.commands.exit_codes import FOUND, exit_codes
from swa_jax.commands.output import JsonOutput, bad_input, emit, show

_EXAMPLES = """Examples:

swa-jax bench

swa-jax bench --pool-tokens 65536 --page-size 64 --batch 32 --rows 32

swa-jax bench --case decode --case free --json bench.json"""
_POSITIVE = options.whole_number()
_CASES = (
    "decode",
    "extend",
    "tail extend",
    "free",
    "free_swa",
    "free_full",
    "free_segment",
    "free_swa_segment",
    "grouped free",
    "group end",
    "extend + free",
    "extend + free_swa + free_full",
    "extend + free_segment",
    "dispatch alone",
)


def register(app: typer.Typer) -> None:
    """Adds the command to an application."""
    codes = exit_codes("swa_jax and the plain-Python free list did different things")
    app.command(epilog=f"{_EXAMPLES}\n\n{codes}")(bench)


def _number(option: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(option, metavar="N", parser=_POSITIVE, help=text)


def bench(
    pool_tokens: Annotated[int, _number("--pool-tokens", "Tokens of each pool.")] = 2**20,
    page_size: options.PageSize = 16,
    batch: Annotated[int, _number("--batch", "Rows that decode.")] = 256,
    rows: Annotated[int, _number("--rows", "Rows that are extended and freed.")] = 256,
    row_tokens: Annotated[int, _number("--row-tokens", "Tokens of each of those.")] = 256,
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            metavar="NAME",
            parser=options.one_of(_CASES),
            autocompletion=options.names_in(_CASES),
            help=f"Time this alone; may be given several times. One of: {', '.join(_CASES)}.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="S",
            parser=options.number_above_zero,
            help="How long each way to do a case is repeated.",
        ),
    ] = 0.2,
    json_file: options.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Time swa_jax's transitions on this device, beside a free list in plain Python.

    Ours are timed as steps of one compiled loop and as single calls. Both allocators are checked
    against each other first, and do the same work in turns.
    """
    with bad_input():
        from swa_jax.bench import here
        from swa_jax.bench.workload import Point
        from swa_jax.commands.progress import show_progress
        from swa_jax.replay.interruptible import interruptible

        out = JsonOutput(json_file)
        point = Point(pool_tokens, page_size, batch, rows, row_tokens)
        workload = here.workload_at(point, seconds)
        try:
            with show_progress(wanted=not (quiet or no_progress)) as shown:
                timed = interruptible(lambda: here.run_here(workload, shown, cases))
        except here.DifferentError as error:
            emit(f"swa-jax: FAILED: {error}\n", sys.stderr)
            raise typer.Exit(FOUND) from None
        if not quiet:
            show(here.as_table(timed), *here.notes(timed), stream=out.stream)
        out.write(here.as_dict(timed))
