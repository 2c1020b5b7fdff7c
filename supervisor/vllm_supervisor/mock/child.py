"""EngineCore and Worker of the stand-in engine: real processes with vLLM's titles, run by path with the standard library.

Rules (vLLM 0.32 on CPU, measured):
* `VLLM::EngineCore` is the main process's child, `VLLM::Worker` is EngineCore's. Titles stand in the command line and,
  cut at 15 characters, in comm; the environment stays readable.
* A byte that comes from the main process goes to the Worker and back: a stopped process stops the engine's steps.
* The main process ends them with TERM. If it is killed they live on, here for `ORPHAN_LIFE` at most.
* A dead Worker ends EngineCore; a dead EngineCore ends its Worker a moment later.

Usage: child.py core|worker TITLE LINK_FD [outlive] [shm PATH]
"""

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time

ORPHAN_LIFE = 600  # seconds a child lives on after its main process was killed: as good as for ever, yet no litter
WORKER_LINGER = 0.5  # seconds a Worker outlives its EngineCore


def set_title(title: str) -> None:
    """Show `title` as comm and as the whole command line, as setproctitle does."""
    libc = ctypes.CDLL(None)
    libc.prctl(15, title.encode()[:15], 0, 0, 0)  # PR_SET_NAME, prctl(2)
    with open("/proc/self/stat") as file:  # noqa: PTH123 - pathlib costs a third of this process's start
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48 and 49 of proc(5)
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, title.encode(), min(len(title), end - start - 1))


def say(title: str, level: str, text: str) -> None:
    """Print a line as vLLM's processes do."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    line = f"({title.removeprefix('VLLM::')} pid={os.getpid()}) {level} {stamp} [core.py:1] {text}\n"
    with contextlib.suppress(OSError):
        os.write(1, line.encode())


def map_file(path: str) -> mmap.mmap | None:
    """Map the shared-memory file, made by whoever comes first; None when /dev/shm is full or missing."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    with contextlib.closing(os.fdopen(fd, "r+b")) as file:
        file.truncate(65536)
        return mmap.mmap(file.fileno(), 65536)


def worker(link: socket.socket) -> None:
    """Echo until EngineCore is gone."""
    while data := link.recv(64):
        link.sendall(data)
    time.sleep(WORKER_LINGER)


def core(title: str, link: socket.socket, *, outlive: bool, shm: str) -> int:
    """Carry bytes between the main process and the Worker; return the exit status."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-S", __file__, "worker", title.replace("EngineCore", "Worker")]
    child = subprocess.Popen(
        [*command, str(theirs.fileno()), *(["outlive"] if outlive else []), *(["shm", shm] if shm else [])],
        pass_fds=[theirs.fileno()],
        start_new_session=outlive,
    )
    theirs.close()
    status = 1
    poller = select.poll()
    poller.register(link, select.POLLIN)
    poller.register(ours, select.POLLIN)
    peers = {link.fileno(): ours, ours.fileno(): link}
    orphan = False
    while True:
        for fd, _ in poller.poll():
            source = link if fd == link.fileno() else ours
            try:
                data = source.recv(64)
            except OSError:
                data = b""
            if data:
                with contextlib.suppress(OSError):
                    peers[fd].sendall(data)
            elif source is ours:
                child.wait()
                name = "VllmWorker-0"
                say(
                    title,
                    "ERROR",
                    f"Worker proc {name} died unexpectedly (exit code: {child.returncode}), shutting down executor.",
                )
                say(title, "ERROR", "EngineCore encountered a fatal error.")
                if orphan:
                    status = 0
                return status
            else:
                orphan = True
                poller.unregister(link)
                signal.alarm(ORPHAN_LIFE)


def main() -> int:
    """Become one of the two processes."""
    role, title, fd, *rest = sys.argv[1:]
    outlive = "outlive" in rest
    shm = rest[rest.index("shm") + 1] if "shm" in rest else ""
    set_title(title)
    mapped = map_file(shm) if shm else None

    def leave(_number: int, _frame: object) -> None:
        if shm and role == "core":
            with contextlib.suppress(OSError):
                os.unlink(shm)  # noqa: PTH108 - see set_title
        os._exit(0)

    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if outlive else leave)
    link = socket.socket(fileno=int(fd))
    if role == "core":
        status = core(title, link, outlive=outlive, shm=shm)
    else:
        link.sendall(b"r")
        worker(link)
        status = 0
    if mapped is not None:
        mapped.close()
    return status


if __name__ == "__main__":
    os._exit(main())
