"""`swa-jax check`: do the laws hold after every call of a program, and in a saved state?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swa_jax.commands import options
from swa_jax.commands.exit_codes import FOUND, exit_codes
from swa_jax.commands.output import JsonOutput, bad_input, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from swa_jax.debug.checked_file import CheckedFile

_EXAMPLES = """Examples:

swa-jax check program.json

swa-jax check tests/recorded/*.json

swa-jax check cache-dir --strict

swa-jax check program.json --quiet --json - | jq .files"""

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE",
        help="A program (JSON of swa_jax.debug.save), or a directory with a saved state "
        "(swa_jax.saved_state, swa-jax serve-http --cache-dir).",
        show_default=False,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Misuse that was counted (a page freed twice, ...) is a failure too; that which a "
        "program says was counted when it was recorded is none.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the command to an application."""
    codes = exit_codes("a law is broken, or a call came to something else than was recorded")
    app.command(epilog=f"{_EXAMPLES}\n\n{codes}")(check)


def check(
    files: Files,
    strict: Strict = False,
    json_file: options.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Run saved programs, or read saved states, and check every law.

    Of a program the laws are checked after every call, and the first call that breaks one is named,
    with the pages and who holds them. Of a saved state they are checked as it is, with its prefix
    cache.
    """
    with bad_input(sizes_are_options=False):
        out = JsonOutput(json_file, reads={f"what is checked, {file}": file for file in files})
        from swa_jax.commands.progress import show_progress
        from swa_jax.debug.checked_file import check_file, open_file
        from swa_jax.need_device import need_device
        from swa_jax.replay.interruptible import interruptible

        opened = [open_file(Path(file)) for file in files]  # what is bad is told before the work
        need_device()
        checked: list[CheckedFile] = []
        with show_progress(wanted=not (quiet or no_progress)) as progress:
            for number, file in enumerate(opened):
                progress(f"checking {file.path}", number, len(opened))
                checked.append(interruptible(lambda file=file: check_file(file, strict=strict)))
        bad = [file for file in checked if not file.ok]
        if not quiet:
            show(_table(checked), stream=out.stream)
        if bad or not quiet:
            show(*(f"{file.path}: {file.problem}" for file in bad), stream=out.stream)
            show(_verdict(checked), stream=out.stream)
        out.write({"ok": not bad, "files": [file.as_plain() for file in checked]})
    if bad:
        raise typer.Exit(FOUND)


def _table(checked: "Sequence[CheckedFile]") -> "Table":
    from rich.table import Table

    table = Table(title="Check", title_justify="left")
    for heading in ("file", "what it is", "misuse counted", "laws"):
        table.add_column(heading, overflow="fold")
    for file in checked:
        misuse = ", ".join(f"{n} {kind}" for kind, n in file.faults.items()) or "none"
        table.add_row(str(file.path), file.what, misuse, file.verdict)
    return table


def _verdict(checked: "Sequence[CheckedFile]") -> str:
    bad = sum(not file.ok for file in checked)
    files = f"{len(checked)} file{'' if len(checked) == 1 else 's'}"
    return f"FAILED: {bad} of {files}" if bad else f"all laws hold in {files}"
