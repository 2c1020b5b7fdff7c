"""Runs the command of vllm-supervisor that follows its name as on a machine where KILL does not end a Worker.

A process in an uninterruptible sleep cannot be made at will. To the supervisor it is one that is still there after KILL;
so here KILL is sent to every process but the Worker, and everything else is the real thing. The waits are shortened.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "supervisor")]

from vllm_supervisor.adapters import processes  # noqa: E402 - the path above comes first
from vllm_supervisor.cli.main import main  # noqa: E402
from vllm_supervisor.core.proc import ProcessId  # noqa: E402
from vllm_supervisor.runtime import engine_room  # noqa: E402

kill = processes.kill


def kill_most(some: Iterable[ProcessId]) -> int:
    """Send KILL to all of them but Workers."""
    return kill(one for one in some if not is_worker(one.pid))


def is_worker(pid: int) -> bool:
    """Say whether a process calls itself a Worker."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::Worker")
    except OSError:
        return False


processes.kill = kill_most
engine_room.PROVE_WITHIN = 0.3
words = sys.argv[1:]
sys.exit(main(words[next(at for at, word in enumerate(words) if word.startswith("--")) :]))
