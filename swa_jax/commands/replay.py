"""`swa-jax replay`: its arguments and help. `swa_jax.commands.replay_run` does the work."""

import typer

from swa_jax.commands import options
from swa_jax.commands.exit_codes import FOUND, exit_codes
from swa_jax.commands.output import bad_input

_EXIT_CODES = exit_codes("the replay found leaks, faults or a broken law")
_EXAMPLES = """Examples:

swa-jax replay mooncake-conversation

swa-jax replay mooncake-conversation --model gemma-3-27b --plot run.png

swa-jax replay trace.jsonl --full-tokens 1048576 --swa-tokens 131072

swa-jax replay azure.csv --model mistral-7b-v0.1 --hbm 80GiB --limit 1000

swa-jax replay trace.jsonl --policy cost --events blocks.jsonl

swa-jax replay mooncake-conversation --hbm 20GiB --host-gib 8

swa-jax replay trace.jsonl --quiet --json - | jq .kv_bytes_peak"""


def register(app: typer.Typer) -> None:
    """Adds the command to an application."""
    app.command(epilog=f"{_EXAMPLES}\n\n{_EXIT_CODES}")(replay)


def replay(
    trace: options.TraceFile,
    model: options.ModelName = "gpt-oss-20b",
    hbm: options.Hbm = None,
    full_tokens: options.FullTokens = None,
    swa_tokens: options.SwaTokens = None,
    page_size: options.PageSize = 16,
    limit: options.Limit = None,
    max_running: options.MaxRunning = 256,
    chunk_tokens: options.ChunkTokens = 8192,
    max_context: options.MaxContext = None,
    no_prefix_cache: options.NoPrefixCache = False,
    policy: options.Policy = "lru",
    host_gib: options.HostGib = None,
    dp: options.Dp = None,
    placement: options.Placement = None,
    no_compare: options.NoCompare = False,
    events_file: options.EventsFile = None,
    json_file: options.JsonFile = None,
    plot_file: options.PlotFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve a request trace in one compiled loop and say what KV memory it took.

    Requests that are rejected because they are too long are no error.
    """
    with bad_input():
        from swa_jax.commands import replay_run

        settings = replay_run.ReplaySettings(
            max_running,
            chunk_tokens,
            max_context,
            prefix_cache=not no_prefix_cache,
            policy=policy,
            host_bytes=None if host_gib is None else int(host_gib * 2**30),
        )
        refused = {"--host-gib": host_gib, "--events": events_file, "--plot": plot_file}
        ranks = replay_run.rank_settings(dp, placement, compare=not no_compare, refused=refused)
        problems = replay_run.run(
            replay_run.Asked(trace, limit, model, settings, ranks),
            replay_run.Sizes(hbm, full_tokens, swa_tokens, page_size),
            replay_run.checked_outputs(trace, json_file, plot_file, events_file),
            quiet=quiet,
            progress=not (quiet or no_progress),
        )
    if problems:
        raise typer.Exit(FOUND)
