"""Entry point of the `swa-jax` command: runs it, and turns what went wrong into one line.

`swa_jax.commands.exit_codes` says what it exits with.
"""

import contextlib
import os
import sys
from collections.abc import Sequence

from swa_jax.commands.exit_codes import BAD_INPUT, INTERRUPTED, OK, READER_GONE
from swa_jax.out_of_memory import is_out_of_memory


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (the process's own if None) and returns the exit code."""
    try:
        code = _run(argv)
        if sys.stdout is not None:  # it is None where the process was started without one
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return READER_GONE
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        _drop_stdout()
        return _fail(f"the output cannot be written: {os.strerror(error.errno)}")
    if code == INTERRUPTED:
        _fail("interrupted")
        if argv is None:
            # Python's own way out can crash in native code that a thread is still running.
            os._exit(INTERRUPTED)
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        import typer

        from swa_jax.commands.app import app_command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"typer", "rich", "click"}:
            raise
        return _fail(f'the command line needs {error.name}: pip install "swa-jax[cli]"')
    try:
        code = app_command().main(argv, prog_name="swa-jax", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        # typer brings its own copy of click's exceptions or uses click's, depending on its
        # version; this method is what the kind that is meant for the user has in common.
        message = getattr(error, "format_message", None)
        if message is None:
            if not is_out_of_memory(error):
                raise
            return _fail(f"out of memory: {error or 'the machine has none left'}")
        asked = getattr(error, "ctx", None)  # what was typed was wrong, and for which command
        hint = f" See {asked.command_path} --help." if asked is not None else ""
        return _fail(message() + hint)
    return code if isinstance(code, int) else OK


def _fail(message: str) -> int:
    with contextlib.suppress(OSError, ValueError):  # stderr is full too: the number must do
        print(f"swa-jax: {' '.join(message.splitlines())}", file=sys.stderr, flush=True)
    return BAD_INPUT


def _drop_stdout() -> None:
    """The reader is gone (`| head`) or the disk full: Python's last flush must not say so again."""
    # A stdout that is no file has nothing to flush to.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
