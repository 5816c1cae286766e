"""Processes that use one cache folder at the same time: a script, since what has started JAX should not fork.

`python cache_processes.py FOLDER crowd|shared|killed COUNT` prints what it saw as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from ejkernel_ops import PersistentCache

WRITERS, READERS = 16, 2


def child(work):
    """Forks a child that exits with 0 if the work says that all is well; returns its id."""
    if pid := os.fork():
        return pid
    try:
        os._exit(0 if work() else 1)
    finally:
        os._exit(2)


def failed(pids):
    return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


def crowd(folder, count):
    """Each writer has keys of its own."""

    def write(number):
        cache = PersistentCache(folder, cfg_type=int)
        for i in range(count):
            cache.put(f"{number}-{i}", 1000 * number + i)
        return cache.stats == {"written": count}

    return {"failed": failed([child(lambda number=number: write(number)) for number in range(WRITERS)])}


def shared(folder, count):
    """All write one key `count` times and until the readers are done, who read it 125 times as often each."""
    done = Path(folder) / "done"

    def write(number):
        os.nice(10)  # readers are to read while there are writers
        cache, written = PersistentCache(folder, cfg_type=list), 0
        while written < count or not done.exists():
            cache.put("shared", [number] * 100)
            written += 1
        return cache.stats == {"written": written}

    def read():
        cache = PersistentCache(folder, cfg_type=list)
        whole = all(value in ([number] * 100 for number in range(WRITERS)) for value in reads(cache))
        return whole and cache.stats == {"hit": 125 * count}

    def reads(cache):
        return (cache.get("shared") for _ in range(125 * count))

    PersistentCache(folder).put("shared", [0] * 100)
    writers = [child(lambda number=number: write(number)) for number in range(WRITERS)]
    readers = failed([child(read) for _ in range(READERS)])
    done.touch()
    return {"failed": failed(writers), "torn": readers}


def killed(folder, count):
    """A writer is killed after 2 to 30 ms, `count` times; whatever it did, an entry can be read."""
    rng, cache, unreadable = random.Random(0), PersistentCache(folder, cfg_type=list), 0
    cache.put("key", [0] * 100)

    def write():
        mine, number = PersistentCache(folder, cfg_type=list), 0
        while True:
            number += 1
            mine.put("key", [number] * 100)

    for _ in range(count):
        pid = child(write)
        time.sleep(rng.uniform(0.002, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        unreadable += cache.get("key") is None
    return {"unreadable": unreadable, "left": sum(name.startswith(".tmp-") for name in os.listdir(folder))}


if __name__ == "__main__":
    folder, what, count = sys.argv[1:]
    print(json.dumps(globals()[what](folder, int(count))))
