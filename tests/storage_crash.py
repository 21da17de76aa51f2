"""Writers that are killed in the middle of it: `python storage_crash.py DIRECTORY COUNT SEED`.

Forks that many writers one after the other and kills each with SIGKILL after a while by chance.
Every writer begins by reading what those before left. Prints how many pages were read.
"""

import os
import random
import select
import signal
import sys
import time

from storage_pages import FINGERPRINT, KEYS, page_of, same

from swa_jax.host_cache.file_storage import FileStorage

MOST = 60_000


def write_until_killed(directory, seed, told):
    rng = random.Random(seed)
    with FileStorage(directory, FINGERPRINT, MOST) as storage:
        read = [storage.get(key) for key in KEYS]
        pages = [(number, page) for number, page in enumerate(read) if page is not None]
        if not all(same(page, page_of(number)) for number, page in pages):
            return
        if (storage.corrupt, storage.foreign) != (0, 0) or storage.used_bytes > MOST:
            return
        os.write(told, bytes([len(pages)]))
        while True:
            key = rng.randrange(len(KEYS))
            storage.put(KEYS[key], page_of(key))


def main(directory, count, seed):
    rng, read = random.Random(seed), 0
    hears, told = os.pipe()
    for turn in range(count):
        child = os.fork()
        if child == 0:
            try:
                write_until_killed(directory, turn, told)
            finally:
                os._exit(1)  # only an error gets here
        if not select.select([hears], [], [], 60)[0]:
            sys.exit(f"writer {turn} found a page that is not right")
        read += os.read(hears, 1)[0]
        time.sleep(rng.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"writer {turn} ended by itself: {status}")
    print(read)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
