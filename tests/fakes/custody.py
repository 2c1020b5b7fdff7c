"""What the tests of processes and output share: small Python children, and trio around a test."""

import functools
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from vllm_supervisor.adapters.child import Child, spawn

LIMIT_S = 30.0  # fails a test that waits for something that never comes


def async_test(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on trio's real clock, bounded."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def bounded() -> None:
            with trio.fail_after(LIMIT_S):
                await test(**fixtures)

        trio.run(bounded)

    return run


def python(code: str, *, env: dict[str, str] | None = None) -> Child:
    """Spawn a Python that runs `code`, without site packages, so that it starts fast."""
    return spawn([sys.executable, "-I", "-S", "-c", code], {"PATH": os.defpath, **(env or {})})


async def read_line(fd: int) -> str:
    """Read from a child's pipe up to and without the next newline (byte by byte: the rest stays for the next call)."""
    line = b""
    while not line.endswith(b"\n"):
        await trio.lowlevel.wait_readable(fd)
        byte = os.read(fd, 1)
        if not byte:
            raise EOFError(line)
        line += byte
    return line.decode().rstrip("\n")


async def end(child: Child) -> int:
    """Kill what may be left of a child, reap it and close its pipes."""
    child.kill()
    status = await child.wait()
    for fd in (child.stdout, child.stderr):
        os.close(fd)
    return status
