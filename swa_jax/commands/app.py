"""The commands of `swa-jax`. Needs typer and rich; `swa_jax.cli.main` runs them.

What a command needs beyond its arguments is imported when it is called: completion in a shell asks
for the arguments alone, and should not wait for JAX.
"""

import inspect
from typing import Annotated, Any

import typer

from swa_jax.commands import bench, check, doctor, models, plan, replay, serving, viz
from swa_jax.commands.exit_codes import exit_codes
from swa_jax.commands.output import emit

_EXAMPLES = """Examples:

swa-jax doctor

swa-jax replay mooncake-conversation --model gpt-oss-20b --hbm 40GiB

swa-jax plan mooncake-conversation --model gemma-3-27b --hbm 80GiB

swa-jax COMMAND --help"""

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def app_command() -> Any:  # noqa: ANN401 - click's Command or typer's own, as the version has it
    """The command, with `main(argv, prog_name=, standalone_mode=)`."""
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        import swa_jax

        emit(f"swa-jax {swa_jax.__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=f"{_EXAMPLES}\n\n{exit_codes()}")
def swa_jax_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """KV-slot allocation for models with full and sliding-window attention."""
    if context.invoked_subcommand is None:
        emit(context.get_help() + "\n")


for _command in (
    replay,
    plan,
    bench,
    check,
    viz,
    models,
    serving,
    doctor,
):
    _command.register(app)


def _flow(group: typer.Typer) -> None:
    """Lets the terminal break the lines of help pages; typer keeps those of the docstrings."""
    for command in group.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(part.split()) for part in paragraphs)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _flow(inner.typer_instance)


_flow(app)
