"""`swa-jax plan`: its arguments and help. `swa_jax.commands.plan_run` does the work."""

import typer

from swa_jax.choices import DEFAULT_HBM
from swa_jax.commands import options
from swa_jax.commands import plan_options as plan_opts
from swa_jax.commands.exit_codes import FOUND, exit_codes
from swa_jax.commands.output import JsonOutput, bad_input
from swa_jax.replay.bundled import BUNDLED

_EXIT_CODES = exit_codes("simulation and replay differ (--confirm)")
_EXAMPLES = """Examples:

swa-jax plan mooncake-conversation --model gpt-oss-20b --hbm 40GiB

swa-jax plan --model gemma-3-27b --hbm 80GiB --weights 54GB --chips 8 --dp 4 --confirm

swa-jax plan trace.jsonl --model llama-4-scout --hbm 60GiB --chips 8 --step-ms 40

swa-jax plan --model gpt-oss-120b --hbm 30GiB --chips 4 --rate 2.5 --step-ms 30 --json plan.json

swa-jax plan --model gpt-oss-20b --hbm 40GiB --chips 4096 --dp 4096 --copies 4096 --limit 64"""


def register(app: typer.Typer) -> None:
    """Adds the command to an application."""
    app.command(epilog=f"{_EXAMPLES}\n\n{_EXIT_CODES}")(plan)


def plan(
    trace: plan_opts.TraceFile = None,
    model: options.ModelName = "gpt-oss-20b",
    hbm: plan_opts.ChipHbm = DEFAULT_HBM,
    chips: plan_opts.Chips = 1,
    trace_option: plan_opts.TraceOption = None,
    dp: plan_opts.Dp = 1,
    weights: plan_opts.Weights = None,
    page_size: options.PageSize = 16,
    limit: options.Limit = None,
    copies: plan_opts.Copies = 1,
    deal: plan_opts.Deal = "round-robin",
    step_ms: plan_opts.StepMs = None,
    rate: plan_opts.Rate = None,
    max_running: plan_opts.MaxRunning = 256,
    chunk_tokens: plan_opts.ChunkTokens = 8192,
    max_context: options.MaxContext = None,
    candidates: plan_opts.Candidates = 32,
    confirm: plan_opts.Confirm = False,
    json_file: options.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the full/SWA split of KV memory that serves a trace with the least retraction.

    Many splits are simulated at once, by counts of pages and without a prefix cache. Those that
    need 25 % more steps than the first that is done are given up. Of those within 2 % of the
    fewest steps the best has, in this order: the fewest retractions, the fewest tokens recomputed,
    the fewest steps, the most room left in the fuller of its pools. A request is retracted when
    memory runs out while it runs: it loses its pages, waits, and the tokens that it had are
    computed again; these are the recomputed tokens. What the best split leaves over in the mean is
    what a prefix cache would have.
    """
    with bad_input():
        from swa_jax.commands import plan_run

        settings = plan_run.PlanSettings(
            hbm_bytes=plan_run.parse_size("--hbm", hbm),
            chips=chips,
            dp=dp,
            weights_bytes=0 if weights is None else plan_run.parse_size("--weights", weights),
            page_size=page_size,
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            max_context=max_context,
            copies=copies,
            step_ms=step_ms,
            rate=rate,
            deal=deal,
            candidates=candidates,
        )
        name = _one_trace(trace, trace_option)
        asked = plan_run.Asked(name, limit, model, settings, confirm)
        out = JsonOutput(json_file, reads={"the trace": name})
        done = plan_run.run(asked, out, quiet=quiet, progress=not (quiet or no_progress))
    if done.differences:
        raise typer.Exit(FOUND)


def _one_trace(argument: str | None, option: str | None) -> str:
    if argument is not None and option is not None:
        raise ValueError(f"give one trace, not both {argument} and --trace {option}")
    return argument or option or next(iter(BUNDLED))
