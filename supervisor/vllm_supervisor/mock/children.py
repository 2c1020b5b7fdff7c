"""The child processes of the stand-in engine: one EngineCore (with its Worker) for each data-parallel engine.

Rules: spawned from the main thread; each death is seen by a pidfd, at once; an orderly end sends TERM and waits; a main
process that is killed leaves them behind, as vLLM's does (`child.py` says for how long).
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from vllm_supervisor.mock.engine import EngineDeadError
from vllm_supervisor.mock.faults import FaultSet

STOP_LIMIT = 2.0  # seconds an EngineCore may take to end after TERM before it is killed (a stopped one cannot end)


class CoreProcess:
    """One EngineCore: its process, and the socket every step goes through."""

    def __init__(self, index: int, engines: int, faults: FaultSet) -> None:
        """Spawn it; `started` waits for its Worker."""
        title = "VLLM::EngineCore" + (f"_DP{index}" if engines > 1 else "")
        ours, theirs = socket.socketpair()
        self.outlives = faults.on("own_session")
        script = str(Path(__file__).with_name("child.py"))
        extra = ["outlive"] if self.outlives else []
        if faults.on("shm"):
            extra += ["shm", f"/dev/shm/psm_{secrets.token_hex(4)}"]  # noqa: S108 - the very place this fault is about
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, "core", title, str(theirs.fileno()), *extra],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=self.outlives,
            )
        self._socket = trio.socket.from_stdlib_socket(ours)

    async def started(self) -> None:
        """Wait until the Worker has reported; raise EngineDeadError if it never will."""
        await self._receive()

    async def beat(self) -> None:
        """One round trip through EngineCore and Worker; raise EngineDeadError when it is cut."""
        try:
            await self._socket.send(b"s")
        except OSError:
            raise EngineDeadError from None
        await self._receive()

    async def _receive(self) -> None:
        try:
            data = await self._socket.recv(64)
        except OSError:
            data = b""
        if not data:
            raise EngineDeadError

    def worker_pids(self) -> list[int]:
        """Give the pids of its Workers; empty once it is gone."""
        pid = self.process.pid
        try:
            return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    async def gone(self) -> None:
        """Wait for its end and take its status."""
        if self.process.returncode is not None:
            return
        fd = os.pidfd_open(self.process.pid)
        try:
            await trio.lowlevel.wait_readable(fd)
        finally:
            os.close(fd)
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


class Children:
    """All EngineCore processes of this engine."""

    def __init__(self, engines: int, faults: FaultSet) -> None:
        """Spawn them all."""
        self.stopping = False
        self.cores = [CoreProcess(index, engines, faults) for index in range(engines)]

    async def started(self) -> None:
        """Wait until every Worker has reported; raise EngineDeadError if one never will."""
        for core in self.cores:
            await core.started()

    def watch(self, nursery: trio.Nursery, on_death: Callable[[], Awaitable[None]]) -> None:
        """Run `on_death` in `nursery` when an EngineCore ends that nobody asked to end."""
        for core in self.cores:
            nursery.start_soon(self._watch_one, core, on_death)

    async def _watch_one(self, core: CoreProcess, on_death: Callable[[], Awaitable[None]]) -> None:
        await core.gone()
        if not self.stopping:
            await on_death()

    async def stop(self) -> None:
        """End them in order, KILL what does not end; those in sessions of their own stay."""
        self.stopping = True
        for core in self.cores:
            if not core.outlives:
                core.signal(signal.SIGTERM)
        with trio.move_on_after(STOP_LIMIT) as limit:
            for core in self.cores:
                if not core.outlives:
                    await core.gone()
        if limit.cancelled_caught:
            for core in self.cores:
                if not core.outlives:
                    core.signal(signal.SIGKILL)
                    await core.gone()
        for core in self.cores:
            core.close()

    def kill_core(self) -> None:
        """KILL the first EngineCore, as a fault."""
        self.cores[0].signal(signal.SIGKILL)

    def kill_worker(self) -> None:
        """KILL the first Worker, as a fault."""
        for pid in self.cores[0].worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
