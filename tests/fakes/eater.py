"""A program that eats memory, 1 GiB a second, up to a limit: an engine, or a neighbour of one.

Run as `python eater.py PORT LIMIT_MIB` it is an engine, a main process with two children, one of which eats. It never
listens: what it shows happens while an engine loads. As `python eater.py alone LIMIT_MIB` it is one process that eats,
and keeps what it has until its standard input ends.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable

STEP = 16 << 20  # bytes, sixty-four times a second
RATE = 1 << 30


def eat(limit: int, then: Callable[[], object]) -> None:
    """Take memory until `limit` bytes are taken, then keep them until `then` returns."""
    room = mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)  # as a driver does; small pages take the kernel a second a GiB to take back
    data, began = b"x" * STEP, time.monotonic()
    for at in range(0, limit, STEP):
        room[at : at + STEP] = data
        time.sleep(max(0.0, began + (at + STEP) / RATE - time.monotonic()))
    then()


def rest() -> None:
    """Do nothing until the parent is gone: no test leaves one of these behind."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)


def main() -> None:
    """Eat, or fork both children and wait."""
    limit = int(sys.argv[2]) << 20
    if sys.argv[1] == "alone":
        eat(limit, sys.stdin.read)
        return
    for child in (lambda: eat(limit, rest), rest):
        if os.fork() == 0:
            child()
            os._exit(0)
    print("eating", flush=True)  # noqa: T201 - what the test waits for
    os.wait()


if __name__ == "__main__":
    main()
