"""`swa-jax generate` and `swa-jax serve-http`. What they need is imported when they are called."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swa_jax.commands import options
from swa_jax.commands import serving_options as serving
from swa_jax.commands.exit_codes import exit_codes
from swa_jax.commands.output import InputError, JsonOutput, bad_input, emit, need
from swa_jax.replay.interruptible import interruptible

if TYPE_CHECKING:
    from swa_jax.config import PoolConfig
    from swa_jax.loaded_model import LoadedModel
    from swa_jax.serving_pools import ServingOptions

_EXIT_CODES = exit_codes(None)
_GENERATE_EXAMPLES = """Examples:

swa-jax generate --checkpoint gemma-3-1b-it --prompt "The capital of France is"

swa-jax generate --checkpoint gpt-oss-20b -p One, -p Two, --max-new-tokens 64 --temperature 0.7

swa-jax generate --checkpoint gemma-3-1b-it --json - < prompt.txt | jq .texts"""
_SERVE_EXAMPLES = """Examples:

swa-jax serve-http --checkpoint gemma-3-1b-it

swa-jax serve-http --checkpoint gpt-oss-20b --dtype bfloat16 --hbm 40GiB --host 0.0.0.0

curl localhost:8000/v1/completions -d '{"model": "gemma-3-1b-it", "prompt": "One,"}'"""


def register(app: typer.Typer) -> None:
    """Adds the commands to an application."""
    app.command(epilog=f"{_GENERATE_EXAMPLES}\n\n{_EXIT_CODES}")(generate)
    app.command("serve-http", epilog=f"{_SERVE_EXAMPLES}\n\n{_EXIT_CODES}")(serve_http)


def generate(
    checkpoint: serving.Checkpoint,
    prompts: serving.Prompts = None,
    max_new_tokens: serving.MaxNewTokens = 64,
    temperature: serving.Temperature = 0.0,
    top_k: serving.TopK = 0,
    top_p: serving.TopP = 1.0,
    seed: serving.Seed = 0,
    dtype: serving.Dtype = "float32",
    hbm: serving.NeededHbm = None,
    full_tokens: options.FullTokens = None,
    swa_tokens: options.SwaTokens = None,
    page_size: options.PageSize = 16,
    max_running: options.MaxRunning = 8,
    chunk_tokens: options.ChunkTokens = 256,
    no_prefix_cache: serving.NoPrefixCache = False,
    draft: serving.Draft = None,
    json_file: serving.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: serving.Quiet = False,
) -> None:
    """Continue prompts with a model from a checkpoint directory."""
    need("generate", "tokenizers", "safetensors", extra="serve")
    from swa_jax.commands import generate_run
    from swa_jax.serving_pools import ServingOptions

    wanted = generate_run.GenerateSettings(max_new_tokens, temperature, top_k, top_p, seed)
    sizes = ServingOptions(
        hbm,
        full_tokens,
        swa_tokens,
        page_size,
        max_running,
        chunk_tokens,
        not no_prefix_cache,
        draft,
    )
    with bad_input():
        out = JsonOutput(json_file)
        texts = _given(prompts)
        asked = generate_run.Asked(checkpoint, dtype, texts, sizes, wanted)
        progress = not (quiet or no_progress)
        outcome, report = generate_run.run(asked, progress=progress)
        if not out.to_stdout:
            emit(generate_run.as_text(outcome))
        if not quiet:
            emit(generate_run.summary(outcome), sys.stderr)
        out.write(report)


def serve_http(
    checkpoint: serving.Checkpoint,
    host: serving.Host = "127.0.0.1",
    port: serving.Port = 8000,
    model_name: serving.ModelName = None,
    dtype: serving.Dtype = "float32",
    hbm: serving.ServedHbm = None,
    full_tokens: options.FullTokens = None,
    swa_tokens: options.SwaTokens = None,
    page_size: options.PageSize = 16,
    max_context: serving.ServedContext = None,
    max_running: options.MaxRunning = 16,
    max_waiting: serving.MaxWaiting = 256,
    chunk_tokens: options.ChunkTokens = 256,
    steps: serving.Steps = 4,
    no_prefix_cache: serving.NoPrefixCache = False,
    draft: serving.Draft = None,
    grace: serving.Grace = 30.0,
    cache_dir: serving.CacheDir = None,
) -> None:
    """Serve a checkpoint to OpenAI's clients: /v1/completions, /v1/models, /metrics, /health."""
    need("serve-http", "starlette", "uvicorn", "tokenizers", "safetensors", extra="serve")
    from swa_jax.serving_pools import ServingOptions

    sizes = ServingOptions(
        hbm,
        full_tokens,
        swa_tokens,
        page_size,
        max_running,
        chunk_tokens,
        not no_prefix_cache,
        draft,
    )
    if cache_dir is not None:
        need("serve-http --cache-dir", "orbax.checkpoint", extra="checkpoint")
    with bad_input():
        if cache_dir is not None and no_prefix_cache:
            raise ValueError("--cache-dir keeps the prefix cache, and --no-prefix-cache has none")
        if cache_dir is not None and Path(cache_dir).exists() and not Path(cache_dir).is_dir():
            raise ValueError(f"--cache-dir must be a directory, and {cache_dir} is a file")
        model = _load(checkpoint, dtype, model_name)
        _serve(model, sizes, host, port, max_context, max_waiting, steps, grace, cache_dir)


def _serve(
    model: "LoadedModel",
    sizes: "ServingOptions",
    host: str,
    port: int,
    max_context: int | None,
    max_waiting: int,
    steps: int,
    grace: float,
    cache_dir: str | None,
) -> None:
    from swa_jax.http import Engine, Served, Server, bind, make_app, serve_until_stopped
    from swa_jax.serving_pools import config_for_server, memory_for

    config = config_for_server(model.kv_config, sizes, max_context)
    try:
        listener = bind(host, port)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"--host {host} --port {port}: cannot listen there: {why}") from None
    with listener:
        engine = Engine(
            Served(
                model.decoder,
                model.params,
                config,
                steps=steps,
                max_waiting=max_waiting,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                weights=model.weights,
            )
        )
        emit(f"swa-jax: compiling for {model.name}\n", sys.stderr)
        with memory_for(config.pool):
            engine.start()
        app = make_app(engine, model.name, model.tokenizer, model.config.vocab_size)
        server = Server(app, engine, grace=grace, log_level="warning")
        address = listener.getsockname()
        listener.listen(2048)  # who has read the line below may connect at once
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        emit(
            f"swa-jax: {model.name} on http://{shown}:{address[1]}/v1, up to {config.max_context} "
            f"tokens a request, {config.pool.full_tokens} full and {config.pool.swa_tokens} SWA "
            "tokens of KV\n",
            sys.stderr,
        )
        with _end_told(config.pool, cache_dir):
            serve_until_stopped(server, engine, listener)


@contextlib.contextmanager
def _end_told(pool: "PoolConfig", cache_dir: str | None) -> Iterator[None]:
    """What ends a server, or keeps it from leaving its cache, where that is the machine's lack."""
    from swa_jax.out_of_memory import device_memory, is_out_of_memory

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            "the server had to end, and what was open got an error: out of memory beside "
            f"{pool.full_tokens:,} full and {pool.swa_tokens:,} SWA tokens of KV; give a smaller "
            f"--hbm or --max-running{device_memory()}"
        ) from error
    except OSError as error:
        if cache_dir is None or error.filename != str(Path(cache_dir).absolute()):
            raise
        raise InputError(
            f"--cache-dir {cache_dir}: {error.strerror}; what was kept there before is as it was"
        ) from error


def _load(checkpoint: str, dtype: str, name: str | None) -> "LoadedModel":
    from swa_jax.loaded_model import load_model

    return interruptible(lambda: load_model(checkpoint, dtype, name))


def _given(prompts: list[str] | None) -> list[str]:
    """The prompts of the command line, or the one on stdin."""
    if prompts:
        return prompts
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("there is no prompt: give --prompt TEXT, or the text on stdin")
    return [sys.stdin.read().removesuffix("\n")]
