"""Looks at the other programs of this machine in /proc.

Rules:
* Call it in a thread: a process that hangs in a driver may hold up whoever reads its command line.
* What may not be read is left out, or None.

Source of facts: proc(5) on status, cmdline, environ and ns.
"""

import os
from contextlib import suppress
from pathlib import Path

from vllm_supervisor.core.neighbours import SMALLEST, Process, parse_status, serve_arguments


def look(proc: Path = Path("/proc")) -> list[Process]:
    """Return every process that may be read; command lines of those that hold much, or are vLLM servers, are in it."""
    here = _network(proc / "self")
    found = []
    for name in filter(str.isdigit, _names(proc)):
        home = proc / name
        with suppress(OSError):
            comm, ppid, size = parse_status((home / "status").read_bytes())
            cmdline = _read(home / "cmdline") or b""
            environ, network = None, here
            if serve_arguments(cmdline) is not None:
                environ, network = _read(home / "environ"), _network(home)
            elif size < SMALLEST:
                cmdline = b""
            same = None in {here, network} or here == network
            found.append(Process(int(name), ppid, comm, size, cmdline, environ, here=same))
    return found


def _names(proc: Path) -> list[str]:
    try:
        return os.listdir(proc)  # noqa: PTH208 - names alone are wanted
    except OSError:
        return []


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _network(home: Path) -> int | None:
    try:
        return (home / "ns/net").stat().st_ino
    except OSError:
        return None
