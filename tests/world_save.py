"""Savers of whole states, killed: `python world_save.py STATES DIRECTORY OUT COUNT SEED`.

Forks COUNT writers one after the other, each of which saves one state after another, over the save
before, until it is killed by SIGKILL. What is there then is copied to OUT, as N-K: the Nth writer's
last finished save was that of state K. STATES is a pickle of a list of what `save_state` takes, as
NumPy arrays: nothing is computed here.
"""

import os
import pickle
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from swa_jax.saved_state import save_state
from swa_jax.saved_state.directory import require_orbax


def save_until_killed(path, states, first, told):
    number = first
    while True:
        save_state(path, *states[number % len(states)])
        os.write(told, bytes([number % len(states)]))
        number += 1


def main(states, path, out, count, seed):
    require_orbax()
    states = pickle.loads(Path(states).read_bytes())
    rng, last = random.Random(seed), 0
    for turn in range(count):
        hears, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(path, states, last + 1, told)
            finally:
                os._exit(1)  # only an error gets here
        said = os.read(hears, 1)  # the first save takes its time
        time.sleep(rng.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(told)
        if not said or not os.WIFSIGNALED(status):
            sys.exit(f"writer {turn} ended by itself: {status}")
        last = [*said, *os.read(hears, 1 << 16)][-1]
        os.close(hears)
        shutil.copytree(path, Path(out) / f"{turn}-{last}")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
