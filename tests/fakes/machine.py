"""A machine's memory for tests: its files as the kernel shows them, and the moment at which processes end."""

import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

GIB = 1 << 30


class Machine:
    """A machine's /proc and kernel log as files, written whole like the kernel shows them."""

    def __init__(self, home: Path) -> None:
        """Begin with 100 of 120 GiB available."""
        self.proc = home / "proc"
        (self.proc / "pressure").mkdir(parents=True)
        (self.proc / "pressure/memory").write_text("full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
        (self.proc / "vmstat").write_text("nr_free_pages 1\noom_kill 0\n")
        self.kernel_log = home / "kmsg"
        self.kernel_log.write_text("3,1,1,-;NVRM: NV_ERR_NO_MEMORY of another time\n")
        self.available(100.0)

    def available(self, gib: float) -> None:
        """Set MemAvailable; the file is replaced at once, as a reader of the kernel's would see it."""
        new = self.proc / "meminfo.new"
        new.write_text(
            f"MemTotal: {120 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {int(gib * (1 << 20))} kB\n"
            f"Cached: {5 << 20} kB\nSwapFree: 0 kB\n"
        )
        new.replace(self.proc / "meminfo")

    def kernel_says(self, line: str) -> None:
        """Append a record to the kernel log."""
        with self.kernel_log.open("a") as log:
            log.write(f"3,2,2,-;{line}\n")

    def has_cards(self, *addresses: str) -> None:
        """Put cards of one model into /proc, as the driver shows them; none has a device file."""
        for minor, address in enumerate(addresses):
            card = self.proc / "driver/nvidia/gpus" / address
            card.mkdir(parents=True)
            (card / "information").write_text(
                f"Model: \t\t NVIDIA X\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n"
            )

    def has_process(self, pid: int, *words: str, gib: float) -> None:
        """Put a process into /proc that holds so much; its environment may not be read."""
        home = self.proc / str(pid)
        home.mkdir()
        (home / "cmdline").write_text("".join(f"{word}\0" for word in words))
        (home / "status").write_text(f"Name:\t{words[0][:15]}\nPPid:\t1\nRssAnon:\t{int(gib * (1 << 20))} kB\n")

    def options(self, *sets: str) -> tuple[str, ...]:
        """Give the options that make a supervisor look here."""
        keys = ("memory.mode=unified", f"memory.proc={self.proc}", f"memory.kernel_log={self.kernel_log}", *sets)
        return tuple(word for key in keys for word in ("--set", key))


class Deaths:
    """The ends of processes that live now, by descriptors: none is missed, however fast."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Hold each of them; all must live."""
        self._fds = {os.pidfd_open(pid) for pid in pids}

    def last(self, within: float) -> float:
        """Wait until all have ended; give the moment the last one did (monotonic seconds). Once."""
        poll, waiting = select.poll(), set(self._fds)
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        deadline, last = time.monotonic() + within, 0.0
        try:
            while waiting:
                ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
                assert ended, f"{len(waiting)} of {len(self._fds)} processes live on after {within} s"
                last = time.monotonic()
                for fd, _ in ended:
                    poll.unregister(fd)
                    waiting.discard(fd)
            return last
        finally:
            for fd in self._fds:
                os.close(fd)
