"""`swa-jax viz`: its arguments and help. `swa_jax.commands.viz_run` does the work."""

import importlib
from types import ModuleType
from typing import Annotated

import typer

from swa_jax.commands import options
from swa_jax.commands.exit_codes import exit_codes
from swa_jax.commands.output import bad_input, emit, need

_CODES = exit_codes(None)
_EXAMPLES = """Examples:

swa-jax viz pools --out two-pools.png

swa-jax viz pools mooncake-conversation --at-step 200 --hbm 4GiB --limit 64 --out pools.png

swa-jax viz pools saved/ --out pools.svg --json -

swa-jax viz timeline mooncake-conversation --limit 100 --out timeline.png

swa-jax viz tree mooncake-conversation --at-step 400 --limit 64 --out tree.png

swa-jax viz window --steps 24 --out window.gif"""

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="A directory that `swa_jax.saved_state` wrote, a trace file, or the bundled "
        "mooncake-conversation. Without one: a small example.",
        show_default=False,
    ),
]
AtStep = Annotated[
    int | None,
    typer.Option(
        "--at-step",
        metavar="N",
        parser=options.whole_number(2**31 - 1),
        help="Stop the replay of a trace after N steps, 64 by default.",
    ),
]
Out = Annotated[
    str,
    typer.Option("--out", metavar="FILE", help="Where the picture goes: .png, .svg or .pdf."),
]
Gif = Annotated[str, typer.Option("--out", metavar="FILE.gif", help="Where the film goes.")]
Steps = Annotated[
    int,
    typer.Option(
        "--steps", metavar="N", parser=options.whole_number(200), help="Tokens that are decoded."
    ),
]
Page = Annotated[
    int,
    typer.Option(
        "--page-size", metavar="N", parser=options.whole_number(64), help="Tokens of a page."
    ),
]
Window = Annotated[
    int,
    typer.Option(
        "--window",
        metavar="W",
        parser=options.whole_number(512),
        help="Past tokens that an SWA layer sees.",
    ),
]
FrameMs = Annotated[
    int,
    typer.Option(
        "--frame-ms",
        metavar="MS",
        parser=options.whole_number(60_000),
        help="How long each frame is seen.",
    ),
]

viz_app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})


def register(app: typer.Typer) -> None:
    """Adds the commands to an application."""
    app.add_typer(viz_app, name="viz", epilog=f"{_EXAMPLES}\n\n{_CODES}")


@viz_app.callback(invoke_without_command=True)
def viz(context: typer.Context) -> None:
    """Draw the pools, a replay's course, the prefix tree, or a window that moves."""
    if context.invoked_subcommand is None:
        emit(context.get_help() + "\n")


def _command() -> ModuleType:
    """What does the work; needs matplotlib."""
    need("swa-jax viz", "matplotlib", extra="plot")
    return importlib.import_module("swa_jax.commands.viz_run")


@viz_app.command(epilog=_CODES)
def pools(
    source: Source = None,
    out: Out = "pools.png",
    at_step: AtStep = None,
    model: options.ModelName = "gpt-oss-20b",
    hbm: options.Hbm = None,
    full_tokens: options.FullTokens = None,
    swa_tokens: options.SwaTokens = None,
    page_size: options.PageSize = 16,
    limit: options.Limit = None,
    max_running: options.MaxRunning = 256,
    chunk_tokens: options.ChunkTokens = 8192,
    no_prefix_cache: options.NoPrefixCache = False,
    json_file: options.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw both pools page by page: who holds what, and which page has which SWA page."""
    with bad_input():
        command = _command()
        command.draw_pools(
            command.Asked(source, at_step, limit, model),
            command.Serving(max_running, chunk_tokens, not no_prefix_cache),
            command.Sizes(hbm, full_tokens, swa_tokens, page_size),
            command.Drawn(out, json_file, quiet, no_progress),
        )


@viz_app.command(epilog=_CODES)
def timeline(
    trace: options.TraceFile,
    out: Out = "timeline.png",
    model: options.ModelName = "gpt-oss-20b",
    hbm: options.Hbm = None,
    full_tokens: options.FullTokens = None,
    swa_tokens: options.SwaTokens = None,
    page_size: options.PageSize = 16,
    limit: options.Limit = None,
    max_running: options.MaxRunning = 256,
    chunk_tokens: options.ChunkTokens = 8192,
    no_prefix_cache: options.NoPrefixCache = False,
    json_file: options.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Replay a trace and draw pages, KV memory and requests over its steps."""
    with bad_input():
        command = _command()
        command.draw_timeline(
            command.Asked(trace, None, limit, model),
            command.Serving(max_running, chunk_tokens, not no_prefix_cache),
            command.Sizes(hbm, full_tokens, swa_tokens, page_size),
            command.Drawn(out, json_file, quiet, no_progress),
        )


@viz_app.command(epilog=_CODES)
def tree(
    source: Source = None,
    out: Out = "tree.png",
    at_step: AtStep = None,
    model: options.ModelName = "gpt-oss-20b",
    hbm: options.Hbm = None,
    full_tokens: options.FullTokens = None,
    swa_tokens: options.SwaTokens = None,
    page_size: options.PageSize = 16,
    limit: options.Limit = None,
    max_running: options.MaxRunning = 256,
    chunk_tokens: options.ChunkTokens = 8192,
    json_file: options.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw the prefix tree: what is live, what is a tombstone, what is locked."""
    with bad_input():
        command = _command()
        command.draw_tree(
            command.Asked(source, at_step, limit, model),
            command.Serving(max_running, chunk_tokens, True),
            command.Sizes(hbm, full_tokens, swa_tokens, page_size),
            command.Drawn(out, json_file, quiet, no_progress),
        )


@viz_app.command(epilog=_CODES)
def window(
    out: Gif = "window.gif",
    steps: Steps = 24,
    page_size: Page = 4,
    past: Window = 8,
    frame_ms: FrameMs = 500,
    json_file: options.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw a film of a window that moves: pages come, leave it, and go to another request."""
    with bad_input():
        command = _command()
        command.draw_window(
            command.Film(steps, page_size, past, frame_ms),
            command.Drawn(out, json_file, quiet, no_progress),
        )
