"""Entry point of the `swa-jax` command: runs it, and turns what went wrong into one line.

Exit codes: 0 all went well, 1 the replay found leaks or faults, 2 bad input, 130 interrupted.
"""

import contextlib
import os
import sys
from collections.abc import Sequence

BAD_INPUT = 2
INTERRUPTED = 130  # as shells count it: 128 + SIGINT
READER_GONE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (those of the process if None) and returns the exit code."""
    try:
        from swa_jax.commands import app_command
    except ModuleNotFoundError as error:
        if not _is_extra(error.name):
            raise
        return _fail(f'the command line needs {error.name}: pip install "swa-jax[cli]"')
    try:
        code = app_command().main(argv, prog_name="swa-jax", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _drop_stdout()
        return READER_GONE
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        _drop_stdout()
        return _fail(f"the output cannot be written: {os.strerror(error.errno)}")
    except Exception as error:
        # typer brings its own copy of click's exceptions or uses click's, depending on its
        # version; this method is what the kind that is meant for the user has in common.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _fail(message())
    if code == INTERRUPTED:
        return _fail("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _is_extra(module: str | None) -> bool:
    return (module or "").partition(".")[0] in {"typer", "rich", "click"}


def _fail(message: str, code: int = BAD_INPUT) -> int:
    print(f"swa-jax: {' '.join(message.splitlines())}", file=sys.stderr)
    return code


def _drop_stdout() -> None:
    """The reader is gone (`| head`) or the disk full: Python's last flush must not say so again."""
    # A stdout that is no file has nothing to flush to.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
