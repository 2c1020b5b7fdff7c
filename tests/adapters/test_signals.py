"""Signals with their sender; each case in a process of its own, because a blocked signal stays blocked."""

import os
import signal
import subprocess
import sys
from typing import IO

import pytest

PRELUDE = (
    "import os, signal, sys, trio\n"
    "from vllm_supervisor.adapters.signals import Signals, die_by, ignored\n"
    "def show(one): print(one.signum, one.pid, one.uid, one.command, flush=True)\n"
)


def receiver(body: str, **more: object) -> subprocess.Popen[str]:
    """Start a process that receives signals as `body` says."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        **more,
    )


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line it prints."""
    out: IO[str] | None = process.stdout
    assert out is not None
    return out.readline().rstrip("\n")


LOOP = (
    "async def main():\n"
    "    signals = Signals({signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD})\n"
    "    print('ready', flush=True)\n"
    "    while True:\n"
    "        for one in await signals.receive():\n"
    "            show(one)\n"
    "            if one.signum == signal.SIGINT: return\n"
    "trio.run(main)\n"
)


def test_the_sender_is_named() -> None:
    """A signal from a process tells its pid, user and command, and the default effect never happens."""
    with receiver(LOOP) as process:
        assert line(process) == "ready"
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            os.kill(process.pid, signum)
            number, pid, uid, command = line(process).split(" ", 3)
            assert (int(number), int(pid), int(uid)) == (signum, os.getpid(), os.getuid())
            assert command.startswith("python")
        os.kill(process.pid, signal.SIGINT)
        assert line(process).startswith(f"{signal.SIGINT} ")
        assert process.wait(30) == 0


def test_a_sender_that_has_gone_leaves_pid_and_user() -> None:
    """The command of a sender that ended before we looked is empty, nothing else is lost."""
    body = (
        "signals = Signals({signal.SIGTERM, signal.SIGCHLD})\n"
        "child = os.fork()\n"
        "if not child: os.kill(os.getppid(), signal.SIGTERM); os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "found = {one.signum: one for one in signals.pending()}\n"
        "print(found[signal.SIGTERM].pid == child, repr(found[signal.SIGTERM].command))\n"
        "print(found[signal.SIGCHLD].pid == child)\n"
        "print(signals.pending())\n"
    )
    with receiver(body) as process:
        assert [line(process) for _ in range(3)] == ["True ''", "True", "[]"]
        assert process.wait(30) == 0


def test_threads_started_later_take_no_signal() -> None:
    """Every thread inherits the mask: a signal to the process reaches the descriptor, whoever runs."""
    body = (
        "signals = Signals({signal.SIGTERM})\n"
        "import threading\n"
        "stop = threading.Event()\n"
        "threads = [threading.Thread(target=stop.wait) for _ in range(4)]\n"
        "[thread.start() for thread in threads]\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print([one.signum == signal.SIGTERM for one in signals.pending()])\n"
        "stop.set()\n"
    )
    with receiver(body) as process:
        assert line(process) == "[True]"
        assert process.wait(30) == 0


def test_ignored_signals_are_known_and_children_stay_ours() -> None:
    """What the parent left ignored is told; an ignored SIGCHLD is undone, or the kernel would reap our children."""
    body = (
        "print(ignored(signal.SIGHUP), ignored(signal.SIGTERM))\n"
        "signals = Signals({signal.SIGTERM})\n"
        "child = os.fork()\n"
        "if not child: os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with receiver(body, preexec_fn=ignore) as process:
        assert [line(process), line(process)] == ["True False", "7"]
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("fault", "signum"),
    [
        ("ctypes.string_at(0)", signal.SIGSEGV),
        ("threading.Thread(target=ctypes.string_at, args=(0,)).start(); time.sleep(30)", signal.SIGSEGV),
        ("os.truncate(file.name, 0); mapped[0]", signal.SIGBUS),
        ("os.abort()", signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGABRT)", signal.SIGABRT),
        ("code.call()", signal.SIGILL),
    ],
)
def test_a_real_fault_is_not_swallowed(fault: str, signum: int) -> None:
    """Every signal is blocked, those of faults too; a fault of our own code ends the process all the same."""
    body = (
        "import ctypes, mmap, tempfile, threading, time\n"
        "from vllm_supervisor.core.signal_policy import to_read\n"
        "signals = Signals(to_read(()))\n"
        "for one in (11, 7, 8, 4, 5, 31): os.kill(os.getpid(), one)\n"
        "print(sorted(found.signum for found in signals.pending()))\n"
        "file = tempfile.NamedTemporaryFile()\n"
        "file.write(bytes(4096)); file.flush()\n"
        "mapped = mmap.mmap(file.fileno(), 4096)\n"
        "class code:\n"
        "    page = mmap.mmap(-1, 4096, prot=7)\n"
        "    page.write({'x86_64': bytes.fromhex('0f0b'), 'aarch64': bytes(4)}[os.uname().machine])\n"
        "    call = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))\n"
        f"{fault}\n"
    )
    with receiver(body) as process:
        assert line(process) == "[4, 5, 7, 8, 11, 31]"
        assert process.wait(30) == -signum


def test_the_library_s_own_signals_end_nothing() -> None:
    """32 and 33 end a process that never used them, also by a thread, where the library opens them: they are dropped."""
    body = (
        "import threading\n"
        "from vllm_supervisor.core.signal_policy import IGNORED, to_read\n"
        "signals = Signals(to_read(()), ignored=IGNORED)\n"
        "stop = threading.Event()\n"
        "thread = threading.Thread(target=stop.wait)\n"
        "thread.start()\n"
        "for one in (32, 33, 13, 25, 34, 64): os.kill(os.getpid(), one)\n"
        "print([found.signum for found in signals.pending()])\n"
        "stop.set(); thread.join()\n"
    )
    with receiver(body) as process:
        assert line(process) == "[34, 64]"
        assert process.wait(30) == 0


def test_a_strange_parents_mask_and_dispositions_are_undone() -> None:
    """What a parent blocked besides is open again, and a stop signal it ignored is read."""
    body = (
        "signals = Signals({signal.SIGTERM, signal.SIGCHLD})\n"
        "print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print([one.signum == signal.SIGTERM for one in signals.pending()])\n"
    )

    def strange() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    with receiver(body, preexec_fn=strange) as process:
        assert [line(process), line(process)] == ["[15, 17]", "[True]"]
        assert process.wait(30) == 0


def test_we_can_end_by_the_signal_itself() -> None:
    """A stop on Ctrl-C ends as one, which is what a shell looks for."""
    with receiver("Signals({signal.SIGINT})\ndie_by(signal.SIGINT)\n") as process:
        assert process.wait(30) == -signal.SIGINT


def test_as_pid_one_the_status_stands_in_for_the_signal() -> None:
    """The kernel ignores a default signal to a namespace's init, so 130 is the exit status there."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRELUDE + "Signals({signal.SIGINT})\ndie_by(signal.SIGINT)\n"]
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    assert subprocess.run([*unshare, *command], env=env, check=False, timeout=30).returncode == 130
