"""Becomes the stand-in engine after it has made a hundred orphans and a hundred zombies, as careless engines do.

The zombies are children of the main process, which it never reads: they come to the supervisor when it ends. The
orphans come at once; half of them end soon, with a status, and the others live until they are swept.
"""

import os
import sys
import time

for number in range(100):
    if not os.fork():
        os._exit(number % 5)
for number in range(100):
    if not os.fork():
        if not os.fork():
            time.sleep(0.5 if number % 2 else 3600)
            os._exit(3)
        os._exit(0)
os.execv(sys.executable, [sys.executable, "-m", "vllm_supervisor.mock", "serve", "tiny", *sys.argv[1:]])  # noqa: S606  # no shell is meant
