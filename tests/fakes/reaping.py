"""A small supervisor, run as PID 1 or as subreaper: own some children, adopt orphans and zombies, tell what happened.

Prints one JSON object: the statuses of the owned children, how many orphans were reaped with which status, and
what is left of our children at the end.
"""

import json
import os
import signal
import sys
from collections import Counter

import trio

from vllm_supervisor.adapters.child import Child, owned, spawn
from vllm_supervisor.adapters.reaper import Reaper, _children, become_subreaper
from vllm_supervisor.adapters.signals import Signals

# 100 processes that end unread while their parent lives, and 100 whose parent ends first and which end later with 3.
ENGINE = """
import os, sys
hold, release = os.pipe()
if not os.fork():
    for number in range(100):
        if not os.fork(): os._exit(number % 5)
    os._exit(0)
for _ in range(100):
    if not os.fork():
        if not os.fork():
            os.close(release); os.read(hold, 1); os._exit(3)
        os._exit(0)
os._exit(42)
"""


async def main() -> None:
    """Run it."""
    signals = Signals({signal.SIGCHLD})
    subreaper = become_subreaper()
    reaper = Reaper(owned)
    reaped: Counter[int] = Counter()
    statuses: dict[str, int] = {}

    async def own(name: str, child: Child) -> None:
        statuses[name] = await child.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(own, "engine", spawn([sys.executable, "-I", "-S", "-c", ENGINE], {}))
        for code in range(50):
            child = spawn(["/bin/sh", "-c", f"sleep 0.{code % 7}; exit {code}"], {})
            nursery.start_soon(own, str(code), child)
        # 100 ended at once, 100 later, and the 101 parents between; the owned ones are awaited by leaving the nursery.
        while sum(reaped.values()) < 301:
            await signals.receive()
            reaped.update(one.status for one in reaper.reap())
    left = sorted(_children())
    told = {"statuses": statuses, "reaped": reaped, "left": left, "pid": os.getpid(), "subreaper": subreaper}
    sys.stdout.write(json.dumps(told))


trio.run(main)
