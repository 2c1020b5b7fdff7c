"""Fuzz both sockets of a real supervisor: the public address and the control socket, from several connections at once.

Run by `scripts/fuzz`, and for a few seconds by a test. Among the rubbish well-behaved callers ask the same things all
the time. What has to hold: the same supervisor lives and answers, logs no internal error, has no more descriptors and
memory in use afterwards, and a stop ends clean with both ledgers in balance.
"""

import argparse
import contextlib
import json
import random
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from fakes.books import Books
from fakes.fuzz_bytes import CONTROL, PUBLIC, End, Visit, visit
from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, Supervisor, until

# Short limits, so that what a fuzzer leaves behind is over soon.
SETTINGS = (
    "front_door.head_timeout=1s", "front_door.body_timeout=1s", "front_door.idle_timeout=2s",
    "front_door.client_stall_timeout=2s", "front_door.max_body=4MiB",
)  # fmt: skip
PUBLIC_WORKERS, CONTROL_WORKERS = 4, 3
PARKED = 40  # connections that one worker leaves open at most
ANSWER_WITHIN = 10.0  # seconds, on a machine that may be busy
LOOK_EVERY = 1.0
MORE_DESCRIPTORS = 16
MORE_MEMORY = 48 << 20  # bytes
FITS = {200, 429, 503}  # of a chat: refused while a fuzzer drains


class Worker(threading.Thread):
    """Visits one socket again and again; its bytes follow from the seed and its name."""

    def __init__(self, name: str, connect: Callable[[], socket.socket], targets: Sequence[str], seed: int) -> None:
        """`connect` makes a connection."""
        super().__init__(name=name, daemon=True)
        self.visits = 0
        self.recent: deque[Visit] = deque(maxlen=20)
        self._connect = connect
        self._targets = targets
        self._seed = seed
        self._parked: deque[socket.socket] = deque()
        self._over = threading.Event()

    def run(self) -> None:
        """Visit until `stop`."""
        while not self._over.is_set():
            chance = random.Random(f"{self._seed} {self.name} {self.visits}")
            one = visit(chance, self._targets)
            self.recent.append(one)
            self.visits += 1
            with contextlib.suppress(OSError):
                self._make(one)
        for sock in self._parked:
            sock.close()

    def stop(self) -> None:
        """Make no further visit."""
        self._over.set()

    def _make(self, one: Visit) -> None:
        sock = self._connect()
        sock.settimeout(0.15)
        try:
            with contextlib.suppress(OSError):
                for piece in one.pieces:
                    sock.sendall(piece)
                    if one.pause:
                        time.sleep(one.pause)
            if one.end is End.PARK:
                self._parked.append(sock)
                if len(self._parked) > PARKED:
                    self._parked.popleft().close()
                return
            if one.end is End.HALF:
                sock.shutdown(socket.SHUT_WR)
            if one.end in (End.HALF, End.READ):
                until_at = time.monotonic() + 0.2  # a follower's answer never ends
                while time.monotonic() < until_at and sock.recv(65536):
                    pass
            if one.end is End.RESET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            if one.end is not End.PARK:
                sock.close()


class Subject:
    """The supervisor that is fuzzed, and what must hold of it."""

    def __init__(self, account: Account) -> None:
        """Start it with the mock engine."""
        self.account = account
        self.port = free_port()
        sets = [word for setting in SETTINGS for word in ("--set", setting)]
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        options = ("--mock-start-time", "0s", "--mock-tokens-per-second", "2000", "--mock-answer-tokens", "4")
        self.supervisor: Supervisor = account.start(
            *sets, "--name", "fuzzed", "--engine", "mock", "serve", "tiny", *address, *options
        )
        self.client = Client(self.port)
        self.path = str(account.home / "run" / "vllm-supervisor" / "fuzzed" / "control.sock")
        self._control = httpx.Client(
            transport=httpx.HTTPTransport(uds=self.path), base_url="http://control", timeout=ANSWER_WITHIN
        )
        self.supervisor.until(self.client.is_ready, within=60.0, what="ready")

    def connect_public(self) -> socket.socket:
        """Connect to the public address."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=1.0)

    def connect_control(self) -> socket.socket:
        """Connect to the control socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(1.0)
        try:
            sock.connect(self.path)
        except OSError:
            sock.close()
            raise
        return sock

    def status(self) -> dict[str, Any]:
        """Ask the control socket for the status."""
        answer: dict[str, Any] = self._control.get("/status").json()
        return answer

    def resume(self) -> None:
        """Open admission again, which a fuzzer may have closed."""
        assert self._control.post("/resume", json={}).status_code == 200

    def expect_service(self) -> None:
        """Fail unless it lives, has met no internal error, and answers on both sockets."""
        assert self.supervisor.process.poll() is None, self.supervisor.words()
        with httpx.Client(base_url=self.client.url, timeout=ANSWER_WITHIN, trust_env=False) as http:
            assert http.get("/livez").status_code == 200
        status = self.status()
        assert status["pid"] == self.supervisor.pid
        assert status["engine"]["incarnation"] == 1, "the engine was restarted"
        chat = self.client.chat(max_tokens=3)
        assert chat.status_code in FITS, chat.text
        self.expect_no_internal_error()

    def expect_no_internal_error(self) -> None:
        """Fail if its log tells of one."""
        bad = [line for line in self.supervisor.log() if line.get("level") == "error"]
        assert not bad, bad[0]
        assert "Traceback" not in self.supervisor.err.text, self.supervisor.words()

    def expect_settled(self, descriptors: int) -> None:
        """Wait until nothing of the fuzzers is left: nothing in flight, and no more descriptors than before."""

        def settled() -> bool:
            status = self.status()
            return (
                status["admission"]["in_flight"] == 0
                and status["executions"].get("running", 0) == 0
                and status["descriptors"]["open"] <= descriptors + MORE_DESCRIPTORS
            )

        until(settled, within=60.0, what="settled", else_say=lambda: json.dumps(self.status(), indent=1))

    @property
    def memory(self) -> int:
        """Its resident memory in bytes."""
        rss: int = psutil.Process(self.supervisor.pid).memory_info().rss
        return rss

    def stop(self) -> None:
        """Stop it and look at what it left."""
        self.supervisor.signal(signal.SIGTERM)
        assert self.supervisor.ends(within=60.0) == 0, self.supervisor.words()
        self.expect_no_internal_error()
        audit = Books(self.account).audit
        assert audit.holds, audit
        self.account.expect_nothing_left()

    def close(self) -> None:
        """Close our connections."""
        self.client.close()
        self._control.close()


def play(*, seconds: float, seed: int, say: Callable[[str], None] = lambda _: None) -> None:
    """Fuzz for so long; raises AssertionError at the first thing that does not hold."""
    with Account() as account:
        subject = Subject(account)
        workers = [
            *(Worker(f"public-{n}", subject.connect_public, PUBLIC, seed) for n in range(PUBLIC_WORKERS)),
            *(Worker(f"control-{n}", subject.connect_control, CONTROL, seed) for n in range(CONTROL_WORKERS)),
        ]
        try:
            _play(subject, workers, seconds, say)
        except BaseException:
            say(f"failed; the last visits of each worker are in {_write_down(workers, seed)}")
            raise
        finally:
            for worker in workers:
                worker.stop()
            subject.close()


def _play(subject: Subject, workers: Sequence[Worker], seconds: float, say: Callable[[str], None]) -> None:
    subject.expect_service()
    descriptors = subject.status()["descriptors"]["open"]
    warm: int | None = None
    begun = time.monotonic()
    for worker in workers:
        worker.start()
    while (now := time.monotonic() - begun) < seconds:
        time.sleep(min(LOOK_EVERY, seconds - now))
        subject.expect_service()
        if warm is None and now > min(60.0, seconds / 3):
            warm = subject.memory
        if int(now) % 60 == 59:
            say(f"{now:.0f} s: {sum(worker.visits for worker in workers)} visits, {subject.memory >> 20} MiB")
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(30.0)
        assert not worker.is_alive(), f"{worker.name} hangs"
    subject.resume()
    subject.expect_settled(descriptors)
    subject.expect_service()
    assert subject.client.chat(max_tokens=3).status_code == 200
    grown = subject.memory - (warm or subject.memory)
    assert grown < MORE_MEMORY, f"{grown >> 20} MiB more memory than after the first minute"
    requests = subject.status()["requests"]
    subject.expect_settled(descriptors)
    subject.stop()
    visits = {name: sum(w.visits for w in workers if w.name.startswith(name)) for name in ("public", "control")}
    say(
        f"{visits['public']} public and {visits['control']} control visits, {requests['accepted']} requests accepted, "
        f"{grown / 2**20:+.1f} MiB, audit holds"
    )


def _write_down(workers: Sequence[Worker], seed: int) -> Path:
    path = Path(tempfile.gettempdir()) / f"fuzz-{seed}.txt"
    text = "\n".join(
        f"{worker.name} visit {worker.visits - len(worker.recent) + index}: {one!r}"
        for worker in workers
        for index, one in enumerate(worker.recent)
    )
    path.write_text(text + "\n", encoding="utf-8")
    return path


def main() -> int:
    """Fuzz, and say how it went."""
    parser = argparse.ArgumentParser(description="fuzz both sockets of a supervisor with the mock engine")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="repeats the bytes of a run")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)  # noqa: T201
    play(seconds=options.seconds, seed=options.seed, say=lambda text: print(text, flush=True))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
