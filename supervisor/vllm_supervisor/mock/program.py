"""The life of the stand-in engine's main process: load, serve, stop, and the ends that faults ask for.

Rules (vLLM 0.32, measured):
* The address is bound at once and listens only when loaded; a Unix socket file is neither taken over nor removed.
* TERM and INT during the load are ignored; afterwards the first one counts: new work is refused with 500 while /health
  is 200, open work may end within `--shutdown-timeout` and is aborted then, exit status 0. HUP and USR1 kill the main
  process and leave the children; QUIT does nothing.
* A dead EngineCore fails everything open, /health becomes 503, and the main process exits **0** some seconds later.
"""

import errno
import os
import signal
import socket
from collections.abc import AsyncIterator

import trio

from vllm_supervisor.mock import texts
from vllm_supervisor.mock.app import App
from vllm_supervisor.mock.children import Children
from vllm_supervisor.mock.control import Control
from vllm_supervisor.mock.engine import Engine, EngineDeadError
from vllm_supervisor.mock.faults import FaultSet
from vllm_supervisor.mock.inference import Inference
from vllm_supervisor.mock.options import OptionError, Options, fault_set, help_text, parse
from vllm_supervisor.mock.web import Server

STOP_TIME = 0.4  # seconds from TERM to the end of an idle engine, /health answering meanwhile
BACKLOG = 2048
PROGRESS_STEPS = 4
_TIMED = {"exit", "signal", "error", "engine_core_dies", "worker_dies"}
FLOOD_TICK = 0.05  # seconds between two batches of the log flood


def run(argv: list[str]) -> int:
    """Run to the end and return the exit status; a fault may end the process by a signal instead."""
    try:
        options = parse(argv, os.environ)
    except OptionError as error:
        texts.write(2, f"usage: vllm serve [model_tag] [options]\nvllm serve: error: {error}\n".encode())
        return 2
    if options.help:
        texts.write(1, help_text().encode())
        return 0
    for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, signal.SIG_IGN
        )  # trio raises signals nobody read once more at its end: they must not count
    texts.name_process("vllm")
    try:
        bound = _bind(options)
    except OSError as error:
        texts.write(2, f"OSError: [Errno {error.errno}] {os.strerror(error.errno or errno.EIO)}\n".encode())
        return 1
    status = trio.run(Program(options, fault_set(options), bound).main)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _bind(options: Options) -> socket.socket:
    """Bind without listening: until the load is done a connection is refused. A headless node gets a nameless socket."""
    if options.headless:
        nameless = socket.socket(socket.AF_UNIX)
        nameless.bind("")
        return nameless
    if options.uds:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(options.uds)
        return bound
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((options.host, options.port))
    return bound


class Program:
    """One life. `main` returns the exit status, negative for a signal."""

    def __init__(self, options: Options, faults: FaultSet, bound: socket.socket) -> None:
        """`bound` is the address, not yet listening."""
        self._options = options
        self._faults = faults
        self._bound = bound
        self._engine = Engine(options, faults)
        self._started = False
        self._ready = False
        self._status = 0
        self._term = trio.Event()
        self._scope = trio.CancelScope()
        self._armed: dict[str, trio.CancelScope] = {}
        self._children: Children

    async def main(self) -> int:
        """Load, serve, and end."""
        texts.log("INFO", f"vLLM stand-in engine, model {self._options.model}")
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            self._children = Children(len(self._engine.cores), self._faults)
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._obey, signals)
                    self._children.watch(self._nursery, self._core_died)
                    self._nursery.start_soon(self._flood)
                    self._nursery.start_soon(self._live, self._children, self._nursery)
                    self._faults.subscribe(self._arm)
                    for name in list(self._faults.texts):
                        self._arm(name)
            if self._status >= 0:
                await self._children.stop()
        return self._status

    def _end(self, status: int) -> None:
        """End the process with this status; the first end counts."""
        if not self._scope.cancel_called:
            self._status = status
            self._scope.cancel()

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async for _ in signals:
            wedged = self._engine.dead and self._faults.on("wedged_exit")
            if self._ready and not wedged and not self._faults.on("ignore_term"):
                self._term.set()

    # -- load, serve, stop -------------------------------------------------------------------------------------

    async def _live(self, children: Children, nursery: trio.Nursery) -> None:
        await self._load(children)
        self._bound.listen(BACKLOG)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._bound))
        control = Control(self._options, self._engine, self._faults)
        inference = Inference(self._options, self._engine, self._faults, nursery)
        server = Server(App(self._options, self._faults, self._engine, control, inference), self._access)
        nursery.start_soon(server.serve, listener)
        nursery.start_soon(self._engine.run, children.cores)
        self._ready = True
        self._engine.wake()
        texts.write(1, b"INFO:     Application startup complete.\n")
        await self._term.wait()
        await self._stop(server, listener, children)
        self._end(0)

    async def _load(self, children: Children) -> None:
        begun = trio.current_time()
        duration = self._options.start_time + self._faults.seconds("slow_start")
        texts.log("INFO", f"Starting to load model {self._options.model}...", process="Worker")
        try:
            await children.started()
        except EngineDeadError:
            await trio.sleep_forever()  # who watches the children ends the process
        self._started = True
        self._engine.wake()
        for step in range(1, PROGRESS_STEPS + 1):
            await trio.sleep_until(begun + duration * step / PROGRESS_STEPS)
            if self._faults.on("load_progress"):
                texts.write(2, texts.progress(step / PROGRESS_STEPS))

    async def _stop(self, server: Server, listener: trio.SocketListener, children: Children) -> None:
        engine = self._engine
        engine.refusing = True
        texts.write(1, b"INFO:     Shutting down\n")
        await engine.hold("slow_term")
        with trio.move_on_after(self._options.shutdown_timeout):
            await engine.until(lambda: not engine.open_requests)
        if self._faults.on("never_exit_with_streams") and engine.open_requests:
            engine.frozen = True
        else:
            engine.abort_all()
        await trio.sleep(STOP_TIME)
        await children.stop()
        await listener.aclose()
        server.close_idle()
        if server.open_connections:
            texts.write(1, b"INFO:     Waiting for connections to close. (CTRL+C to force quit)\n")
        await server.drained()
        texts.write(1, b"INFO:     Application shutdown complete.\n")

    # -- ends nobody asked for ---------------------------------------------------------------------------------

    async def _core_died(self) -> None:
        if not self._ready:
            texts.log("ERROR", "Engine core initialization failed. See root cause above. Failed core proc(s): {}")
            self._end(1)
            return
        self._engine.die()
        texts.log("ERROR", "AsyncLLM output_handler failed.", source="async_llm.py:1")
        texts.log("ERROR", f"vllm.v1.engine.exceptions.EngineDeadError: {texts.ENGINE_DEAD}", source="async_llm.py:1")
        await trio.sleep(self._options.death_time)
        await self._engine.until(lambda: not self._faults.on("wedged_exit"))
        texts.write(1, b"INFO:     Application shutdown complete.\n")
        self._end(0)

    def _arm(self, name: str) -> None:
        """Begin, begin anew or give up what a fault asks for at a time, and print what it asks for at once."""
        if self._faults.on(name) and name in texts.ON_DEMAND:
            texts.write(1, texts.ON_DEMAND[name](self._faults.count(name) or 0))
        if name in _TIMED:
            self._armed.pop(name, trio.CancelScope()).cancel()
            if self._faults.on(name):
                self._nursery.start_soon(self._at_its_time, name)

    async def _at_its_time(self, name: str) -> None:
        with trio.CancelScope() as scope:
            self._armed[name] = scope
            ending = self._faults.ending(name)
            await self._engine.until(lambda: self._ready or (self._started and ending is not None and ending.load))
            if ending is None:
                await trio.sleep(self._faults.seconds(name))
                (self._children.kill_core if name == "engine_core_dies" else self._children.kill_worker)()
                return
            await trio.sleep(ending.seconds or 0)
            limit = self._engine.answered + (ending.requests or 0)
            await self._engine.until(lambda: self._engine.answered >= limit)
            self._end(_status_of(name, ending.what))

    async def _flood(self) -> None:
        """Print the lines of the log flood, in batches."""
        number = 0
        while True:
            await self._engine.until(lambda: bool(self._faults.count("log_flood")))
            until = number + max(1, round((self._faults.count("log_flood") or 0) * FLOOD_TICK))
            lines = [f"(APIServer pid={os.getpid()}) INFO flood line {line}\n" for line in range(number, until)]
            texts.write(1, "".join(lines).encode())
            number = until
            await trio.sleep(FLOOD_TICK)

    def _access(self, line: str) -> None:
        if self._options.access_log:
            texts.write(1, line.encode("utf-8", "replace"))


def _status_of(name: str, what: str) -> int:
    if name == "exit":
        return int(what)
    if name == "signal":
        return -signal.Signals[f"SIG{what}"]
    return texts.error(what)
