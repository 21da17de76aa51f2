"""Saves that are killed or damaged: `python saving_crash.py DIRECTORY COUNT SEED`.

Forks that many writers one after the other, each of which saves again and again until it is killed
by SIGKILL, and after each a reader, which must find a save that is right. Then damages each file of
the last save in turn: a reader must find it out, or read what was saved. Prints how often it was
found out, and how many files there are.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from swa_jax.saved_state.directory import read_arrays, require_orbax, write_arrays

FOUND, WRONG, NONE = 0, 1, 2


def arrays_of(seed):
    rng = np.random.default_rng(seed)
    return {
        "seed": np.full(1, seed),
        "large": rng.integers(0, 9, (300, 40)),
        **{f"part.{at}": rng.normal(size=(7, at + 1)) for at in range(2)},
    }


def save_until_killed(path, seed, told):
    while True:
        write_arrays(path, {"of": "writers"}, arrays_of(seed))
        os.write(told, b".")
        seed += 1


def is_right(found):
    wanted = arrays_of(int(found["seed"][0]))
    return found.keys() == wanted.keys() and all(
        found[name].tobytes() == wanted[name].tobytes() for name in wanted
    )


def look(path):
    try:
        return FOUND if is_right(read_arrays(path, {"of": "writers"})) else WRONG
    except FileNotFoundError:
        return NONE


def damage(path, rng):
    files = [file for file in sorted(Path(path).rglob("*")) if file.is_file()]
    refused = 0
    for file in files:
        content = file.read_bytes()
        for turn in range(3):
            damaged, at = bytearray(content), rng.randrange(max(1, len(content)))
            if turn == 0:
                file.unlink()
            else:
                damaged[at : at + 1] = bytes([(content[at] if content else 0) ^ 1 << turn])
                file.write_bytes(damaged)
            try:
                found = read_arrays(path, {"of": "writers"})
            except (ValueError, FileNotFoundError):
                refused += 1
            else:
                if not is_right(found):
                    sys.exit(f"{file} is damaged at {at}, and was read")
            file.write_bytes(content)
    print(refused, len(files))


def in_child(call, *args):
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = call(*args)
        finally:
            os._exit(code)
    return child


def main(path, count, seed):
    require_orbax()
    rng = random.Random(seed)
    for turn in range(count):
        hears, told = os.pipe()
        writer = in_child(save_until_killed, path, 1000 * turn, told)
        os.read(hears, 1)  # the first save takes its time
        time.sleep(rng.uniform(0, 0.1))
        os.kill(writer, signal.SIGKILL)
        os.close(hears)
        os.close(told)
        if not os.WIFSIGNALED(os.waitpid(writer, 0)[1]):
            sys.exit(f"writer {turn} ended by itself")
        seen = os.waitstatus_to_exitcode(os.waitpid(in_child(look, path), 0)[1])
        if seen != FOUND:
            sys.exit(f"after writer {turn} a reader found {seen}")
    damage(path, rng)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
