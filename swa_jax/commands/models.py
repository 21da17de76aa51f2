"""`swa-jax models`: which models are known, and all about one of them."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swa_jax.commands import options
from swa_jax.commands.exit_codes import exit_codes
from swa_jax.commands.output import JsonOutput, bad_input, show

if TYPE_CHECKING:
    from swa_jax.models import ModelConfig

_EXAMPLES = """Examples:

swa-jax models

swa-jax models gemma-3-27b

swa-jax models --json - | jq -r .models[].name"""


def register(app: typer.Typer) -> None:
    """Adds the command to an application."""
    app.command(epilog=f"{_EXAMPLES}\n\n{exit_codes(None)}")(models)


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show all about this one.",
            autocompletion=options.model_names,
            show_default=False,
        ),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """List the known models: layers, window, KV bytes of a token, source."""
    with bad_input():
        from swa_jax.commands.model_table import model_table, models_table
        from swa_jax.models import MODELS, get_model

        out = JsonOutput(json_file)
        shown = list(MODELS.values()) if name is None else [get_model(name)]
        show(models_table() if name is None else model_table(shown[0]), stream=out.stream)
        out.write({"ok": True, "models": [_figures(model) for model in shown]})


def _figures(model: "ModelConfig") -> dict[str, Any]:
    return dataclasses.asdict(model) | {
        "past_window": model.past_window,
        "full_bytes_per_token": model.full_bytes_per_token,
        "swa_bytes_per_token": model.swa_bytes_per_token,
    }
