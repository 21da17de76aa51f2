"""`swa-jax doctor`: is this machine, and this installation, good for swa_jax?"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from swa_jax.commands import options
from swa_jax.commands.exit_codes import FOUND, exit_codes
from swa_jax.commands.output import JsonOutput, bad_input, show

if TYPE_CHECKING:
    from rich.table import Table

    from swa_jax.doctor.finding import Finding

_EXAMPLES = """Examples:

swa-jax doctor

JAX_PLATFORMS=cpu swa-jax doctor

swa-jax doctor --quiet --json - | jq .findings"""
_STYLES = {"ok": "green", "note": "yellow", "failed": "bold red"}


def register(app: typer.Typer) -> None:
    """Adds the command to an application."""
    codes = exit_codes("something is broken (a line that says failed)")
    app.command(epilog=f"{_EXAMPLES}\n\n{codes}")(doctor)


def doctor(
    json_file: options.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Report versions, devices, memory kinds, donation and extras, and run a self-test.

    A line says ok, note (works, but you should know) or failed. It takes half a minute or so.
    """
    with bad_input():
        from swa_jax.commands.progress import show_progress
        from swa_jax.doctor.examine import examine
        from swa_jax.doctor.finding import FAILED
        from swa_jax.replay.interruptible import interruptible

        out = JsonOutput(json_file)
        with show_progress(wanted=not (quiet or no_progress)) as shown:
            found = interruptible(lambda: examine(shown))
        broken = [finding for finding in found if finding.status == FAILED]
        if not quiet:
            show(_table(found), _verdict(found), stream=out.stream)
        elif broken:
            show(_table(broken), _verdict(found), stream=out.stream)
        out.write({"ok": not broken, "findings": [vars(finding) for finding in found]})
    if broken:
        raise typer.Exit(FOUND)


def _table(found: Sequence["Finding"]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, title="Doctor", title_justify="left")
    for style in ("bold", None, None):
        table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    last = None
    for finding in found:
        if last not in (None, finding.group):
            table.add_section()
        heading = "" if finding.group == last else finding.group
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(heading, finding.name, status, Text(finding.text))
        last = finding.group
    return table


def _verdict(found: Sequence["Finding"]) -> str:
    broken = [finding.name for finding in found if finding.status == "failed"]
    if broken:
        return f"FAILED: {', '.join(broken)}"
    notes = sum(finding.status == "note" for finding in found)
    told = "" if not notes else f", {notes} note" + ("" if notes == 1 else "s")
    return f"nothing is broken{told}"
