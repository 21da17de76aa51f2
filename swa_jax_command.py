"""Where the `swa-jax` script begins: beside the package, so that it may start without all of it.

`import swa_jax` imports JAX, which takes longer than a shell may take to complete a word, and is of
no use for a help page either. Both need the commands' arguments alone, and these stand in modules
that need no JAX.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence

# Packages on the way to those modules whose own `__init__` is left out.
_LEFT_OUT = ("swa_jax", "swa_jax.models")


def main() -> int:
    """Runs the command line of this process and returns the exit code."""
    if "_SWA_JAX_COMPLETE" in os.environ or _only_asks_for_help(sys.argv[1:]):
        for name in _LEFT_OUT:
            _stand_in(name)
    from swa_jax.cli import main as run

    return run()


def _only_asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether nothing will run: `swa-jax`, `swa-jax --help`, `swa-jax replay -h`."""
    match list(arguments):
        case [] | ["-h" | "--help"]:
            return True
        case [command, "-h" | "--help"]:
            return not command.startswith("-")
    return False


def _stand_in(name: str) -> None:
    """Lets modules of a package be imported though the package itself is not."""
    spec = importlib.util.find_spec(name)
    if spec is not None:
        sys.modules[name] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    sys.exit(main())
