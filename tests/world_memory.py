"""A process that gets little more memory than it has: `python world_memory.py COMMAND...`.

Runs a `swa-jax` command line that asks for more, and ends with its exit code.
"""

import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import swa_jax as swa
from swa_jax import cli

MORE = 2**30  # bytes


def main(command):
    state = swa.init(swa.PoolConfig(64, 64, 4, 4))  # all that JAX needs for itself is taken
    state, grant = swa.alloc(state, 8, capacity=8)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MORE, held + MORE))
    try:
        jax.block_until_ready(swa.init(swa.PoolConfig(2**28, 2**28, 1, 4)))
    except Exception as error:
        print(type(error).__name__, str(error), flush=True)
    swa.check(state)  # what was there is as it was
    assert jnp.array_equal(grant.slots, jnp.arange(4, 12, dtype=jnp.int32))
    return cli.main(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
