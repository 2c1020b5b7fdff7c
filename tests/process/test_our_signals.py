"""Signals to the supervisor as a process: what each does, and that whoever sent it is named."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from fakes.supervisor_process import Account, StartMock, Supervisor

AT_ONCE = ("--mock-start-time", "0s")


def test_what_a_signal_does_and_who_sent_it(start_mock: StartMock) -> None:
    """QUIT writes evidence, USR1 and HUP say what they did, a stray one is ignored; the engine notices none of them."""
    supervisor, client = start_mock(*AT_ONCE)
    supervisor.until(client.is_ready, within=30.0, what="ready")
    sent = {"SIGQUIT": "evidence bundle", "SIGUSR1": "nothing to reopen", "SIGHUP": "reloading", "SIGUSR2": "ignored"}
    for name, said in sent.items():
        supervisor.signal(signal.Signals[name])
        supervisor.until_said(f"{name} from pid {os.getpid()} (uid {os.getuid()}, ")
        assert said in supervisor.events("signal")[-1]["sentence"]
    supervisor.until_said("nothing to reload: ")
    supervisor.until(lambda: supervisor.events("incident"), within=20.0, what="the bundle")
    assert client.chat().status_code == 200
    assert len(supervisor.events("spawned")) == 1
    supervisor.signal(signal.SIGTERM)
    supervisor.until_said(f"stop requested by SIGTERM from pid {os.getpid()}")
    assert supervisor.ends(within=10.0) == 0, supervisor.words()


STRANGE = (
    "import os, signal, sys\n"
    "for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(one, signal.SIG_IGN)\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)
# These two end us by design; these two stop, which is asked of others; a terminal's three stop a process.
NOT_SENT = {signal.SIGKILL, signal.SIGABRT, signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGSTOP}
# What the stand-in, a Python program, does not ignore by itself, nor the C library for a child.
INHERITED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD, signal.SIGTSTP, signal.SIGXCPU, 40)
STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


@pytest.mark.parametrize("under", [(), (sys.executable, "-c", STRANGE)], ids=["plain", "strange parent"])
def test_every_signal_is_survived(under: tuple[str, ...], start_mock: StartMock, account: Account) -> None:
    """None of the 64 that is no stop ends us or reaches the engine, which starts without a mask or an ignored signal."""
    supervisor, client = start_mock(*AT_ONCE, under=under)
    supervisor.until(client.is_ready, within=30.0, what="ready")
    [spawned] = supervisor.events("spawned")
    status = Path(f"/proc/{spawned['pid']}/status").read_text()
    assert "\nSigBlk:\t0000000000000000\n" in status
    ignored = int(status.partition("\nSigIgn:\t")[2].split()[0], 16)
    assert not ignored & sum(1 << number - 1 for number in INHERITED), f"{ignored:016x}"
    for number in sorted(set(range(1, 65)) - NOT_SENT - STOPS):
        os.kill(supervisor.pid, number)
    for number in sorted(STOPS):
        os.kill(supervisor.pid, number)
        os.kill(supervisor.pid, signal.SIGCONT)
    supervisor.until_said("signal 64 from")
    supervisor.until_said("SIGSEGV from")
    supervisor.until(lambda: supervisor.events("incident"), within=20.0, what="the bundle that QUIT asks for")
    assert client.chat().status_code == 200
    assert len(supervisor.events("spawned")) == 1
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    account.expect_nothing_left()


def test_the_limit_of_cpu_time_stops_in_order(start_mock: StartMock, account: Account) -> None:
    """XCPU begins a stop, and the next ones, which come each second, hasten nothing."""
    supervisor, client = start_mock(*AT_ONCE)
    supervisor.until(client.is_ready, within=30.0, what="ready")
    with client.stream(max_tokens=60) as words:
        next(words)
        supervisor.signal(signal.SIGXCPU)
        supervisor.until_said("stop requested by SIGXCPU")
        supervisor.signal(signal.SIGXCPU)
        supervisor.until_said("was ignored")
        assert list(words)[-1] == "[DONE]"
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    account.expect_nothing_left()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, None], ids=["TERM", "INT", "stop"])
def test_a_stop_asked_twice_at_once_cuts_nothing(
    second: signal.Signals | None, start_mock: StartMock, account: Account
) -> None:
    """A unit's ExecStop and its manager's own TERM, a wrapper's INT, `stop` and TERM: one wish, and streams end whole."""
    supervisor, client = start_mock(*AT_ONCE, "--mock-tokens-per-second", "20", before=("--name", "twice"))
    supervisor.until(client.is_ready, within=30.0, what="ready")
    path = account.home / "run" / "vllm-supervisor" / "twice" / "control.sock"
    with client.stream(max_tokens=40) as words, httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as control:
        next(words)
        if second is None:
            assert control.post("http://control/stop").json()["does"].startswith("stopping: ")
        else:
            supervisor.signal(second)
        supervisor.until_said("stop requested by")
        supervisor.signal(signal.SIGTERM)
        supervisor.until_said("it counts once")
        assert list(words)[-1] == "[DONE]"
    clean = -signal.SIGINT if second is signal.SIGINT else 0
    assert supervisor.ends(within=10.0) == clean, supervisor.words()


def test_a_later_stop_still_cuts(start_mock: StartMock) -> None:
    """More than a second after the first, a second TERM ends the drain: what is open is cut, status 80."""
    supervisor, client = start_mock(*AT_ONCE, "--mock-tokens-per-second", "5")
    supervisor.until(client.is_ready, within=30.0, what="ready")
    with client.stream(max_tokens=400) as words:
        next(words)
        supervisor.signal(signal.SIGTERM)
        supervisor.until_said("stop requested by SIGTERM")
        a_second_later(supervisor)
        supervisor.signal(signal.SIGTERM)
        supervisor.until_said("hurrying")
        with contextlib.suppress(httpx.RemoteProtocolError):  # an aborted connection follows the error
            assert "drain_deadline" in "".join(words)
    assert supervisor.ends(within=10.0) == 80, supervisor.words()


def a_second_later(supervisor: Supervisor) -> None:
    """Wait until a request to stop is a new one."""
    over = time.monotonic() + 1.05
    supervisor.until(lambda: time.monotonic() > over, within=5.0, what="a second")


def test_a_terminal_that_hangs_up_stops_us(start_mock: StartMock, account: Account) -> None:
    """HUP means TERM where we have a controlling terminal, and the status of a clean stop."""
    supervisor, client = start_mock(*AT_ONCE, terminal=True)
    supervisor.until(client.is_ready, within=30.0, what="ready")
    supervisor.signal(signal.SIGHUP)
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    account.expect_nothing_left()


def test_under_nohup_a_hang_up_is_nothing(start_mock: StartMock) -> None:
    """Ignored when we started, HUP stays ignored, on a terminal as well."""
    supervisor, client = start_mock(*AT_ONCE, under=("nohup",), before=("--set", "log.format=json"))
    supervisor.until(client.is_ready, within=30.0, what="ready")
    supervisor.signal(signal.SIGHUP)
    supervisor.until_said("SIGHUP from")
    assert "ignored" in supervisor.events("signal")[-1]["sentence"]
    assert client.is_ready()


@pytest.mark.parametrize("load", [True, False])
def test_the_third_request_kills(load: bool, start_mock: StartMock, account: Account) -> None:
    """An engine that ignores TERM and has ten minutes for it ends at the third signal, loading or serving."""
    patient = ("--set", "drain.budget=10m", "--set", "engine.stop_grace=10m")
    slow = ("--mock-start-time", "10m") if load else AT_ONCE
    supervisor, client = start_mock("--mock-fault", "ignore_term", *slow, before=patient)
    if load:
        supervisor.named("VLLM::EngineCore")
    else:
        supervisor.until(client.is_ready, within=30.0, what="ready")
    for number, words in ((1, "stop requested by"), (2, "hurrying"), (3, "hurrying")):
        supervisor.signal(signal.SIGTERM)
        supervisor.until(lambda n=number: len(supervisor.events("stop_requested")) == n, within=10.0, what=words)
        if number < 3:
            a_second_later(supervisor)
    third = time.monotonic()
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    assert time.monotonic() - third < 4.0, "it waited for the short budget of 5 s"
    assert supervisor.events("exited")[0]["raw"] == -9
    account.expect_nothing_left()
