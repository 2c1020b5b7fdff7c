"""The engine's main process: what it inherits, how its end is told, who may reap it."""

import errno
import os
import signal
import socket
from pathlib import Path

import pytest
import trio

from fakes.custody import async_test, end, python, read_line
from vllm_supervisor.adapters.child import Child, SpawnError, StatusLostError, owned, spawn

FATAL = sorted(
    signal.valid_signals()
    - {
        signal.SIGCHLD,
        signal.SIGCONT,
        signal.SIGURG,
        signal.SIGWINCH,
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)


def shell(script: str) -> Child:
    """Spawn sh, which starts in a millisecond."""
    return spawn(["/bin/sh", "-c", script], {})


def session_nice(child: Child) -> str:
    """Return the priority of its session, as the kernel shows it."""
    return Path(f"/proc/{child.pid}/autogroup").read_text(encoding="ascii").rpartition("nice ")[2].strip()


def open_descriptors() -> list[Path]:
    """Return what is open in this process."""
    return list(Path("/proc/self/fd").iterdir())


@async_test
async def test_every_exit_code_is_told() -> None:
    """All 256 exit codes come back as they are."""
    for code in range(256):
        child = shell(f"exit {code}")
        assert await child.wait() == code == child.status
        await end(child)


@async_test
async def test_a_child_that_became_another_user_s_takes_no_signal_and_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the kernel forbids the signal (the engine runs behind sudo) False says that nothing was sent."""
    child = shell("exec sleep 60")

    def forbidden(_pidfd: int, _signum: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", forbidden)
        assert not child.terminate()
        assert not child.kill()
    assert child.kill()
    await child.wait()
    await end(child)


@async_test
async def test_every_fatal_signal_is_told() -> None:
    """A child ended by any signal that ends a process comes back as its negative number."""
    for signum in FATAL:
        child = shell("ulimit -c 0; echo ready; exec sleep 60")
        assert await read_line(child.stdout) == "ready"
        assert child.send(signum)
        assert await child.wait() == -signum
        await end(child)


@async_test
async def test_the_child_starts_clean() -> None:
    """Its mask is empty, nothing is ignored, it leads its own session, its stdin is null and only 0, 1, 2 are open."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leak = socket.socket()
    leak.set_inheritable(True)
    child = python(
        "import os, signal\n"
        "status = dict(line.split(':\\t', 1) for line in open('/proc/self/status') if ':\\t' in line)\n"
        "print(status['SigBlk'].strip(), status['SigIgn'].strip())\n"
        "print(os.getsid(0) == os.getpid(), os.readlink('/proc/self/fd/0'))\n"
        "print(sorted(fd for fd in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + fd)))\n"
        "print(sorted(os.environ))\n",
        env={"ONLY": "this"},
    )
    try:
        # CPython itself ignores PIPE and XFSZ (bits 12 and 24) once it runs; 32 and 33 are the C library's own.
        blocked, ignored = (int(mask, 16) for mask in (await read_line(child.stdout)).split())
        assert (blocked, ignored & ~0x1_8000_0000) == (0, 0x100_1000)
        assert await read_line(child.stdout) == "True /dev/null"
        assert await read_line(child.stdout) == "['0', '1', '2']"
        assert "ONLY" in await read_line(child.stdout)
        assert await child.wait() == 0
    finally:
        await end(child)
        leak.close()
        signal.signal(signal.SIGHUP, hup)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@async_test
async def test_the_child_s_session_leaves_us_the_processor() -> None:
    """Where the kernel shares the processor between sessions, the child's gets less than ours."""
    child = shell("exec sleep 60")
    try:
        assert session_nice(child) == "5"
    finally:
        child.kill()
        await child.wait()
        await end(child)


@async_test
async def test_a_kernel_without_session_groups_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child starts all the same where nothing can be written there."""

    def nothing(path: Path, *_: object, **__: object) -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "write_text", nothing)
    child = shell("exit 3")
    assert await child.wait() == 3
    await end(child)


@async_test
async def test_stop_is_asked_once() -> None:
    """TERM reaches the main process once; a second call sends nothing and says so."""
    child = python(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'term\\n'))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    assert await read_line(child.stdout) == "ready"
    assert child.terminate()
    assert not child.terminate()
    assert await read_line(child.stdout) == "term"
    assert child.kill()
    assert await child.wait() == -signal.SIGKILL
    assert not child.kill()
    assert not child.send(signal.SIGTERM)
    os.set_blocking(child.stdout, True)
    assert os.read(child.stdout, 100) == b""
    await end(child)


@async_test
async def test_several_tasks_may_wait() -> None:
    """Every waiter gets the same status, and the pid is owned exactly until it is reaped."""
    child = shell("sleep 0.05; exit 7")
    got: list[int] = []

    async def wait() -> None:
        got.append(await child.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
    assert got == [7, 7]
    assert child.pid not in owned()
    await end(child)


@async_test
async def test_a_cancelled_wait_reaps_nothing() -> None:
    """A wait that is cancelled leaves the child to the next wait."""
    child = shell("sleep 60")
    with trio.move_on_after(0):
        await child.wait()
    assert child.status is None
    assert child.pid in owned()
    assert await end(child) == -signal.SIGKILL


@async_test
async def test_a_stolen_status_is_a_fault() -> None:
    """If somebody else reaps the child, no status is made up."""
    child = shell("exit 7")
    os.waitpid(child.pid, 0)  # noqa: ASYNC222 - the theft itself
    with pytest.raises(StatusLostError, match=str(child.pid)):
        await child.wait()
    os.close(child.stdout)
    os.close(child.stderr)


@pytest.mark.parametrize(("name", "code"), [("missing", errno.ENOENT), ("plain", errno.EACCES), (".", errno.EACCES)])
def test_a_program_that_cannot_start_is_named(tmp_path: Path, name: str, code: int) -> None:
    """The kernel's refusal is told with its number and path, and no descriptor is left open."""
    (tmp_path / "plain").write_text("not executable")
    path = str(tmp_path / name)
    before = open_descriptors()
    with pytest.raises(SpawnError) as caught:
        spawn([path], {})
    assert (caught.value.errno, caught.value.path) == (code, path)
    assert path in caught.value.sentence
    assert open_descriptors() == before
