"""Writes an evidence bundle: what the engine's processes were doing, before anything touches them.

Rules:
* Best effort, and never in the way: every tool has `TOOL_LIMIT` seconds, everything together `LIMIT`; what failed, was
  not allowed or took too long is a line in the bundle. Nothing here raises, and nothing here stops the engine.
* Threads are read from /proc (state, wchan, CPU time), which needs no ptrace: it works in containers where py-spy does
  not. CPU is read twice, half a second apart: a thread that spins and one that sleeps look alike otherwise.
* Reading and writing happen in a thread that is left behind when it hangs: a wedged disk or driver must not stop us.
* Tools are started and reaped by whoever owns all children of ours (`Starter`): a child that nobody owns is taken for an
  orphan of the engine, its status reaped and itself killed with the engine.
* Directories 0700, files 0600, each at most `FILE_LIMIT` bytes; number and total size of the bundles are bounded.
* Directories are opened without following a link and files made in them by descriptor. Of what stands there only what we
  made is removed: our file names in a directory of ours, then the directory if nothing else is in it.
* A bundle is `N.new` until its account is written, then `N`: an unfinished one is known by its name.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio

from vllm_supervisor.core import redact
from vllm_supervisor.core.errors import is_thread_limit
from vllm_supervisor.core.incident import Bundle, surplus
from vllm_supervisor.core.private_paths import directory_refusal

TOOL_LIMIT = 5.0
LIMIT = 10.0
FILE_LIMIT = 1024 * 1024
BETWEEN_CPU = 0.5
# More threads than any engine has; past this the listing is cut, and says so.
THREADS_KEPT = 2000
# Of the engine's processes, those a stack dump is tried of: the API server, EngineCores and workers of one machine.
DUMPED = 10
_TICKS = os.sysconf("SC_CLK_TCK")
_UNFINISHED = ".new"
_ACCOUNT = "incident.json"
_DRAFT = "incident.new"
_OUR_FILES = re.compile(r"incident\.(?:json|new)|(?:threads|meminfo|nvidia-smi|py-spy-\d+)\.txt", re.ASCII)


@dataclass(frozen=True, slots=True)
class Written:
    """One bundle: its number and where it is, what could not be had, and whether a write failed.

    Number 0 means that there is none: nothing could be written below `path`.
    """

    number: int
    path: Path
    problems: tuple[str, ...] = ()
    unwritten: bool = False


class Tool(Protocol):
    """One started tool: the non-blocking read ends of its pipes, which are ours to close, and its end."""

    stdout: int
    stderr: int

    async def wait(self) -> int:
        """Wait for the end; return the exit status, negative for a signal."""

    def kill(self) -> bool:
        """Send KILL."""


@dataclass(frozen=True, slots=True)
class Starter:
    """How tools are started: `spawn(argv, env)` raises OSError; `leave` waits in the background for one we gave up on."""

    spawn: Callable[[Sequence[str], Mapping[str, str]], Tool]
    leave: Callable[[Callable[[], Awaitable[object]]], None]


@dataclass(slots=True)
class _Notes:
    problems: list[str] = field(default_factory=list)


async def write_bundle(
    root: Path,
    document: Mapping[str, Any],
    pids: Sequence[int],
    *,
    search_path: str,
    starter: Starter,
    keep: int,
    max_size: int,
) -> Written:
    """Make the next bundle below `root` and return when it is written, or when its time is over.

    `pids` are the engine's processes, the main one first; `search_path` is where py-spy and nvidia-smi are looked for.
    """
    notes = _Notes()
    draft = begun = None  # the directory before there is something to see in it; and after that
    unwritten = False
    with trio.move_on_after(LIMIT) as scope:
        try:
            number, draft = await _thread(_next_directory, root)
            await _thread(_write_json, draft, {"number": number, **document, "complete": False})
            path = await _thread(_begin, root, number)
            begun = number, path
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_threads, path, list(pids), notes)
                nursery.start_soon(_tools, path, list(pids), search_path, starter, notes)
            problems = {"problems": notes.problems, "complete": True}
            await _thread(_write_json, path, {"number": number, **document, **problems})
            await _thread(_prune, root, keep, max_size)
        except* OSError as faults:  # what goes wrong in a nursery comes out as a group
            unwritten = True
            notes.problems.append(f"the bundle could not be written: {_first(faults)}")
            if draft and not begun:
                await _thread(_remove, root, draft.name)
    if scope.cancelled_caught:
        notes.problems.append(f"not everything was collected within {LIMIT:.0f} s")
    number, path = begun or (0, root)
    return Written(number, path, tuple(notes.problems), unwritten)


def tidy(root: Path) -> str:
    """Remove what an earlier run left of bundles it could not write; to be called before any is begun.

    Return why no bundle can be written there, empty if nothing speaks against it.
    """
    try:
        with _opened(root) as directory:
            for name in _names(directory):
                if name.endswith(_UNFINISHED) and name.removesuffix(_UNFINISHED).isdecimal():
                    _remove(root, name)
                elif name.isdecimal():
                    with contextlib.suppress(OSError), _opened(root / name) as bundle:
                        os.unlink(_DRAFT, dir_fd=bundle)
    except FileNotFoundError:
        return ""
    except OSError as fault:
        return fault.strerror or str(fault)
    return ""


def _first(faults: BaseExceptionGroup[OSError]) -> str:
    fault: BaseException = faults
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return getattr(fault, "strerror", None) or str(fault)


async def _thread(call: Any, *arguments: Any) -> Any:
    try:
        return await trio.to_thread.run_sync(partial(call, *arguments), abandon_on_cancel=True)
    except RuntimeError as fault:
        if not is_thread_limit(fault):
            raise
    return call(*arguments)  # slower for everybody, but the bundle is there


# -- processes -------------------------------------------------------------------------------------------------------


async def _threads(path: Path, pids: list[int], notes: _Notes) -> None:
    """Write every thread's state, wchan and CPU time, and what they used between two looks."""
    first = await _thread(_look, pids)
    await trio.sleep(BETWEEN_CPU)
    second = await _thread(_look, pids)
    if not second:
        notes.problems.append("no thread of the engine could be read")
    lines = [f"{'pid':>8} {'tid':>8} {'name':<16} {'state':<5} {'cpu s':>10} {'between':>7}  wchan"]
    for key, (name, state, cpu, wchan) in list(second.items())[:THREADS_KEPT]:
        used = cpu - first[key][2] if key in first else cpu
        lines.append(f"{key[0]:>8} {key[1]:>8} {name:<16} {state:<5} {cpu:>10.2f} {used:>7.2f}  {wchan}")
    if len(second) > THREADS_KEPT:
        lines.append(f"… and {len(second) - THREADS_KEPT} more")
    await _thread(_write, path / "threads.txt", "\n".join([*lines, ""]))
    await _thread(_write, path / "meminfo.txt", _read("/proc/meminfo"))


def _look(pids: list[int]) -> dict[tuple[int, int], tuple[str, str, float, str]]:
    """Return {(pid, tid): (name, state, CPU seconds, wchan)} of all threads that can be read."""
    found = {}
    for pid in pids:
        try:
            tids = sorted(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
        except OSError:
            continue
        for tid in tids:
            stat = _read(f"/proc/{pid}/task/{tid}/stat")
            name, _, rest = stat.partition("(")[2].rpartition(")")
            fields = rest.split()
            if len(fields) < 13:
                continue
            cpu = (int(fields[11]) + int(fields[12])) / _TICKS
            found[pid, tid] = (name, fields[0], cpu, _read(f"/proc/{pid}/task/{tid}/wchan") or "-")
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# -- tools -----------------------------------------------------------------------------------------------------------


async def _tools(path: Path, pids: list[int], search_path: str, starter: Starter, notes: _Notes) -> None:
    """Run what is installed, all at once, each into a file of its own."""
    commands = {}
    spy = shutil.which("py-spy", path=search_path)
    if spy is None:
        notes.problems.append("py-spy is not installed: no stack dumps")
    else:
        # Without `--nonblocking` it would stop the process it looks at.
        commands = {f"py-spy-{pid}": [spy, "dump", "--nonblocking", "--pid", str(pid)] for pid in pids[:DUMPED]}
    smi = shutil.which("nvidia-smi", path=search_path)
    if smi is not None:
        commands["nvidia-smi"] = [smi]
    async with trio.open_nursery() as nursery:
        for name, command in commands.items():
            nursery.start_soon(_tool, path / f"{name}.txt", command, search_path, starter, notes)


async def _tool(file: Path, command: list[str], search_path: str, starter: Starter, notes: _Notes) -> None:
    """Run one tool, its output into `file`; what outlives its time is killed and not waited for."""
    name = file.stem
    try:
        tool = starter.spawn(command, {"PATH": search_path, "LC_ALL": "C.UTF-8"})
    except OSError as fault:
        notes.problems.append(f"{name}: {fault.strerror}")
        return
    output = bytearray()
    status = None
    try:
        with trio.move_on_after(TOOL_LIMIT) as scope:
            async with trio.open_nursery() as nursery:
                for fd in (tool.stdout, tool.stderr):
                    nursery.start_soon(_collect, fd, output)
            status = await tool.wait()
    finally:
        os.close(tool.stdout)
        os.close(tool.stderr)
        if status is None:
            tool.kill()
            starter.leave(tool.wait)  # hung in a driver it outlives even that; it must not hold us
    if scope.cancelled_caught:
        notes.problems.append(f"{name} gave no answer within {TOOL_LIMIT:.0f} s")
    elif status != 0:
        notes.problems.append(f"{name} ended with status {status}")
    # py-spy names each process by its whole command line.
    await _thread(lambda: _write(file, redact.lines(output.decode("utf-8", "replace"))))


async def _collect(fd: int, output: bytearray) -> None:
    """Read a tool's pipe to its end; what is beyond the bound is read and dropped, so that the tool never waits."""
    while True:
        await trio.lowlevel.wait_readable(fd)
        data = os.read(fd, 65536)
        if not data:
            return
        output += data[: max(0, FILE_LIMIT - len(output))]


# -- files -----------------------------------------------------------------------------------------------------------


def _next_directory(root: Path) -> tuple[int, Path]:
    """Make the directory of the next bundle, under its unfinished name. Raises OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(root) as directory:
        while True:
            names = (name.removesuffix(_UNFINISHED) for name in _names(directory))
            number = max((int(name) for name in names if name.isdecimal()), default=0) + 1
            try:
                os.mkdir(f"{number}{_UNFINISHED}", 0o700, dir_fd=directory)
            except FileExistsError:  # another bundle is being begun at the same moment
                continue
            return number, root / f"{number}{_UNFINISHED}"


def _begin(root: Path, number: int) -> Path:
    """Give a bundle its name. Raises OSError."""
    with _opened(root) as directory:
        os.rename(f"{number}{_UNFINISHED}", str(number), src_dir_fd=directory, dst_dir_fd=directory)
    return root / str(number)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Hold a directory that we made open; the way to the first of them was judged at the start. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as fault:
        raise NotADirectoryError(fault.errno, f"{path} is a link or a file; move it away") from None
    try:
        found = os.fstat(fd)
        if why := directory_refusal(found.st_mode, found.st_uid, os.geteuid()):
            raise PermissionError(errno.EPERM, f"{path} is not ours: {why}; move it away")
        if found.st_mode & 0o077:
            os.fchmod(fd, 0o700)
        yield fd
    finally:
        os.close(fd)


def _names(directory: int) -> list[str]:
    return os.listdir(directory)


def _create(name: str, directory: int) -> int:
    """Make a new file; one of an earlier try goes first. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)


def _write(path: Path, text: str) -> None:
    with _opened(path.parent) as directory, open(_create(path.name, directory), "wb") as file:
        file.write(text.encode("utf-8", "replace")[:FILE_LIMIT])


def _write_json(bundle: Path, document: Mapping[str, Any]) -> None:
    """Write the account of a bundle whole, or leave the one before it."""
    text = json.dumps(document, indent=1, default=str)
    with _opened(bundle) as directory:
        try:
            with open(_create(_DRAFT, directory), "wb") as file:
                file.write(text.encode())
            os.rename(_DRAFT, _ACCOUNT, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(_DRAFT, dir_fd=directory)
            raise


def _remove(root: Path, name: str) -> None:
    """Remove a bundle as far as we made it: what else stands in it stays, and the directory with it."""
    with contextlib.suppress(OSError), _opened(root) as directory:
        with _opened(root / name) as bundle:
            for file in _names(bundle):
                if _OUR_FILES.fullmatch(file):
                    os.unlink(file, dir_fd=bundle)
        os.rmdir(name, dir_fd=directory)


def _prune(root: Path, keep: int, max_size: int) -> None:
    with _opened(root) as directory:
        names = [name for name in _names(directory) if name.isdecimal()]
    bundles = [Bundle(int(name), size) for name in names if (size := _size(root / name)) is not None]
    for number in surplus(bundles, keep, max_size):
        _remove(root, str(number))


def _size(bundle: Path) -> int | None:
    """Return the bytes of a bundle's files; None if the directory holds no account of ours."""
    try:
        with _opened(bundle) as directory:
            names = _names(directory)
            return sum(os.lstat(name, dir_fd=directory).st_size for name in names) if _ACCOUNT in names else None
    except OSError:
        return None
