"""Other programs on this machine: who holds memory, and which are vLLM servers that no supervisor owns.

Rules:
* What counts as held is memory of a process's own (anonymous and shared) and what the GPU's driver says it has: mapped
  files are page cache, which is available.
* We and everything below us are no neighbours.
* A vLLM server is told by its command line, never by its name alone; it is a supervisor's if its environment carries the
  mark, or, where that may not be read, if it listens on a socket such as we make.

Sources: proc(5) on status, vLLM 0.32 (`vllm serve`, `python -m vllm.entrypoints.openai.api_server`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_supervisor.core.custody import INSTANCE
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.memory import GIB, gib
from vllm_supervisor.core.proc import title, variable
from vllm_supervisor.core.vllm_words import take_apart

SMALLEST = GIB // 2  # bytes: who holds less is not worth a name
SHOWN = 3
REMEDY = "stop it, or give each its share of the memory and a port of its own"
_DEFAULT_PORT = 8000
_OUR_SOCKET = re.compile(r"/(?:engine-[0-9a-f]{8}-\d+|vsup-[^/]+)/sock$")
_MODULES = {"vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"}
_PYTHON = re.compile(r"python[\d.]*")


@dataclass(frozen=True, slots=True)
class Process:
    """One process. `size`: bytes of its own; `environ` None: it may not be read; `here`: in our network namespace."""

    pid: int
    ppid: int
    comm: str
    size: int
    cmdline: bytes = b""
    environ: bytes | None = None
    here: bool = True


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A program that holds memory. `size` in bytes."""

    name: str
    pid: int
    size: int


@dataclass(frozen=True, slots=True)
class Server:
    """A vLLM server without a supervisor. `port` None: it listens on a Unix socket, or the port is in a file of its own.

    `size`: bytes that it and its processes hold.
    """

    pid: int
    host: str
    port: int | None
    size: int
    here: bool = True

    def __str__(self) -> str:
        """Name it for people."""
        where = "no port known" if self.port is None else f"port {self.port}"
        return f"vllm serve (pid {self.pid}, {where}, {gib(self.size)})"


def parse_status(status: bytes) -> tuple[str, int, int]:
    """Read /proc/PID/status: name, parent and bytes of its own; a kernel thread has none."""
    fields = dict(line.partition(b":")[::2] for line in status.splitlines())

    def number(name: bytes) -> int:
        words = fields.get(name, b"").split()
        return int(words[0]) if words and words[0].isdigit() else 0

    return (
        fields.get(b"Name", b"").strip().decode("utf-8", "replace"),
        number(b"PPid"),
        1024 * (number(b"RssAnon") + number(b"RssShmem")),
    )


def biggest(processes: Iterable[Process], us: int, on_gpu: Mapping[int, int]) -> tuple[Neighbour, ...]:
    """Return who holds most, the largest first; `us` is our pid, `on_gpu` the driver's bytes by pid."""
    table = {one.pid: one for one in processes}
    ours = _family(table, us)
    found = [
        Neighbour(title(one.comm, one.cmdline), one.pid, one.size + on_gpu.get(one.pid, 0))
        for one in table.values()
        if one.pid not in ours
    ]
    found = sorted((one for one in found if one.size >= SMALLEST), key=lambda one: -one.size)
    return tuple(found[:SHOWN])


def named(neighbours: Sequence[Neighbour]) -> str:
    """Name them for people."""
    return ", ".join(f"{one.name} (pid {one.pid}, {gib(one.size)})" for one in neighbours)


def bare_servers(processes: Iterable[Process], us: int, on_gpu: Mapping[int, int]) -> tuple[Server, ...]:
    """Return the vLLM servers of this machine that belong to no supervisor."""
    table = {one.pid: one for one in processes}
    ours = _family(table, us)
    found = []
    for one in table.values():
        arguments = serve_arguments(one.cmdline)
        if arguments is None or one.pid in ours or _supervised(one, arguments):
            continue
        if one.ppid in table and serve_arguments(table[one.ppid].cmdline) is not None:
            continue  # a fork of it that has not named itself yet
        host, port = address(arguments)
        size = sum(table[pid].size + on_gpu.get(pid, 0) for pid in _family(table, one.pid))
        found.append(Server(one.pid, host, port, size, one.here))
    return tuple(sorted(found, key=lambda server: server.pid))


def serve_arguments(cmdline: bytes) -> list[str] | None:
    """Return what stands after `serve` in the command line of a vLLM server; None: it is none."""
    words = [word.decode("utf-8", "replace") for word in cmdline.rstrip(b"\0").split(b"\0")]
    if _PYTHON.fullmatch(words[0].rpartition("/")[2]):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-m":
            words = words[2:] if words[0] in {"-X", "-W"} else words[1:]
        if words[:1] == ["-m"]:
            module, words = words[1:2], words[2:]
            if module == ["vllm.entrypoints.openai.api_server"]:
                return words
            words = ["vllm", *words] if module and module[0] in _MODULES else []
    if len(words) >= 2 and words[0].rpartition("/")[2] == "vllm" and words[1] == "serve":
        return words[2:]
    return None


def address(arguments: Sequence[str]) -> tuple[str, int | None]:
    """Return host and port of a `vllm serve` command line; None: a Unix socket, or the port may stand in its file."""
    try:
        given = take_apart(arguments, {"--host", "--port", "--uds", "--config"}).given
    except UsageError:
        return "", None
    host = next(iter(given.get("--host", ())), "")
    port = next(iter(given.get("--port", ())), None)
    if next(iter(given.get("--uds", ())), "") or (port is None and "--config" in given):
        return host, None
    if port is None:
        return host, _DEFAULT_PORT
    return host, int(port) if port.isdigit() else None


def _supervised(one: Process, arguments: Sequence[str]) -> bool:
    if one.environ is not None:
        return variable(one.environ, INSTANCE) is not None
    return any(_OUR_SOCKET.search(word) for word in arguments)


def _family(table: Mapping[int, Process], root: int) -> set[int]:
    """Return `root` and its descendants, as far as they are in the table."""
    children: dict[int, list[int]] = {}
    for one in table.values():
        children.setdefault(one.ppid, []).append(one.pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
    return found & table.keys()
