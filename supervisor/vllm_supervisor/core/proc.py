"""What Linux tells of a process, as values: parsers of /proc/PID/stat, cmdline and environ.

Rules:
* A process is named by (pid, start time): a pid alone can be reused, the pair cannot within one boot.
* A zombie leader whose other threads still run is alive: the kernel frees nothing before the last thread ends.
* Command lines can hold keys, so only their first words are ever shown.

Source: proc(5), Documentation/filesystems/proc.rst.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_supervisor.core.plain_text import one_line

_SHOWN = 80  # characters of a command that are worth a log line


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """One process for ever: its pid and when it started (clock ticks since boot)."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Stat:
    """One /proc/PID/stat. `cpu_ticks` is user and system time, `rss_pages` resident memory, both of the whole process."""

    id: ProcessId
    comm: str
    state: str
    ppid: int
    pgid: int
    sid: int
    threads: int
    cpu_ticks: int
    rss_pages: int

    @property
    def dead(self) -> bool:
        """True once nothing of it runs any more (a zombie that only waits to be reaped)."""
        return self.state in "ZXx" and self.threads <= 1


def parse_stat(data: bytes) -> Stat:
    """Read one /proc/PID/stat; the name in parentheses may itself hold spaces and parentheses."""
    head, _, tail = data.rpartition(b")")
    pid, _, comm = head.partition(b" (")
    field = tail.split()
    return Stat(
        ProcessId(int(pid), int(field[19])),
        comm.decode("utf-8", "replace"),
        field[0].decode("ascii", "replace"),
        ppid=int(field[1]),
        pgid=int(field[2]),
        sid=int(field[3]),
        threads=int(field[17]),
        cpu_ticks=int(field[11]) + int(field[12]),
        rss_pages=max(0, int(field[21])),
    )


def has_variables(environ: bytes, wanted: Iterable[tuple[str, str]]) -> bool:
    """Say whether /proc/PID/environ holds every NAME=VALUE of `wanted`, whole entries only."""
    entries = set(environ.split(b"\0"))
    return all(f"{name}={value}".encode("utf-8", "surrogateescape") in entries for name, value in wanted)


def variable(environ: bytes, name: str) -> str | None:
    """Return the value of one variable in /proc/PID/environ, or None."""
    prefix = name.encode() + b"="
    for entry in environ.split(b"\0"):
        if entry.startswith(prefix):
            return entry.removeprefix(prefix).decode("utf-8", "surrogateescape")
    return None


def title(comm: str, cmdline: bytes) -> str:
    """Name a process: its comm (cut at 15 bytes by the kernel), whole where its title shows the rest of the word."""
    words = cmdline.replace(b"\0", b" ").split()
    first = words[0].decode("utf-8", "replace") if words else ""
    return first if first.startswith(comm) else comm


def command_words(comm: str, cmdline: bytes) -> str:
    """Show a command to a person: the program and its first argument unless that is an option, never more."""
    words = [word.decode("utf-8", "replace") for word in cmdline.split(b"\0") if word]
    if not words:
        return comm
    shown = [words[0].rpartition("/")[2] or words[0], *(word for word in words[1:2] if not word.startswith("-"))]
    return one_line(" ".join(shown), _SHOWN)
