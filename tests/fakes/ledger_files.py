"""A ledger writer on a real directory, and a file system that fails by name."""

import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from vllm_supervisor.adapters.ledger_file import FileOps, LedgerFile
from vllm_supervisor.core.ledger import LedgerPolicy
from vllm_supervisor.core.ledger_parser import parse
from vllm_supervisor.runtime.ledger_writer import LedgerWriter

LIMIT_S = 20.0


class FailingOps(FileOps):
    """Real calls, until one is told to fail (`errors[name]`, as often as `times`) or to hang until `gate` is set."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.times: dict[str, int] = {}
        self.short_writes = False
        self.gate = threading.Event()
        self.gate.set()
        self.hung = threading.Event()
        self.hang = ""
        self.synced = threading.Event()
        self.writes = 0  # calls, failed ones included

    def _call(self, name: str) -> None:
        if self.hang == name and not self.gate.is_set():
            self.hung.set()
            assert self.gate.wait(LIMIT_S)
        if name in self.errors and self.times.get(name, 1) > 0:
            self.times[name] = self.times.get(name, 1) - 1
            raise OSError(self.errors[name], os.strerror(self.errors[name]))

    def fail(self, name: str, error: int, times: int = 1) -> None:
        """Let the call `name` fail with `error` so often."""
        self.errors[name], self.times[name] = error, times

    def write(self, fd: int, data: memoryview) -> int:  # type: ignore[override]
        """Write, as far as it is let."""
        self.writes += 1
        if self.short_writes and "write" in self.errors and self.times["write"] > 0 and len(data) > 4:
            done = os.write(fd, data[:4])
            self.short_writes = False
            return done
        self._call("write")
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        """Sync, if it is let."""
        self._call("fsync")
        os.fsync(fd)
        self.synced.set()

    def truncate(self, fd: int, size: int) -> None:  # type: ignore[override]
        """Cut, if it is let."""
        self._call("truncate")
        os.ftruncate(fd, size)


def line(number: int, size: int = 0) -> bytes:
    """Build a small ledger line that names `number`."""
    pad = "x" * size
    return (
        f'{{"t":1.0,"at":"2026-01-01T00:00:00.000Z","boot":"b","run":"r","inc":0,"event":"phase",'
        f'"number":{number},"pad":"{pad}"}}\n'
    ).encode()


def numbers(directory: Path) -> list[int | str]:
    """List the numbers of the lines in the files, and the event of each line that has none."""
    found: list[int | str] = []
    for path in sorted(directory.iterdir()):
        for text in path.read_bytes().splitlines():
            record = parse(text)
            assert record is not None, text
            found.append(record.get("number", record["event"]))
    return found


def simple(event: str, **fields: object) -> bytes:
    """Build a small ledger line of another kind."""
    extra = "".join(f',"{key}":{value}' for key, value in fields.items())
    return (
        f'{{"t":1.0,"at":"2026-01-01T00:00:00.000Z","boot":"b","run":"r","inc":0,"event":"{event}"{extra}}}\n'
    ).encode()


def run_writer(
    directory: Path,
    body: Callable[[LedgerWriter], Awaitable[None]],
    *,
    ops: FileOps | None = None,
    policy: LedgerPolicy | None = None,
    segment_bytes: int = 1 << 20,
) -> LedgerWriter:
    """Run `body` with a started writer and close it."""
    writer = LedgerWriter(
        LedgerFile(directory, segment_bytes, ops=ops),
        policy or LedgerPolicy(sync="off"),
        header=lambda segment, oldest, first: simple("segment", segment=segment, oldest_needed=oldest, read_from=first),
        gap=lambda lost: simple("gap", lost=lost),
    )

    async def main() -> None:
        with trio.fail_after(LIMIT_S):
            writer.start()
            await body(writer)
            assert await writer.aclose(LIMIT_S)

    trio.run(main)
    return writer
