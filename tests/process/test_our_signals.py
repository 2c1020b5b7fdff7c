"""Signals to the supervisor as a process: what each does, and that whoever sent it is named."""

import os
import signal
import time

import pytest

from fakes.supervisor_process import Account, StartMock

AT_ONCE = ("--mock-start-time", "0s")


def test_what_a_signal_does_and_who_sent_it(start_mock: StartMock) -> None:
    """QUIT writes evidence, USR1 and HUP say what they did, a stray one is ignored; the engine notices none of them."""
    supervisor, client = start_mock(*AT_ONCE)
    supervisor.until(client.is_ready, within=10.0, what="ready")
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


def test_a_terminal_that_hangs_up_stops_us(start_mock: StartMock, account: Account) -> None:
    """HUP means TERM where we have a controlling terminal, and the status of a clean stop."""
    supervisor, client = start_mock(*AT_ONCE, terminal=True)
    supervisor.until(client.is_ready, within=10.0, what="ready")
    supervisor.signal(signal.SIGHUP)
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    account.expect_nothing_left()


def test_under_nohup_a_hang_up_is_nothing(start_mock: StartMock) -> None:
    """Ignored when we started, HUP stays ignored, on a terminal as well."""
    supervisor, client = start_mock(*AT_ONCE, under=("nohup",), before=("--set", "log.format=json"))
    supervisor.until(client.is_ready, within=10.0, what="ready")
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
        supervisor.until(client.is_ready, within=10.0, what="ready")
    for number, words in ((1, "stop requested by"), (2, "hurrying"), (3, "hurrying")):
        supervisor.signal(signal.SIGTERM)
        supervisor.until(lambda n=number: len(supervisor.events("stop_requested")) == n, within=10.0, what=words)
    third = time.monotonic()
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    assert time.monotonic() - third < 4.0, "it waited for the short budget of 5 s"
    assert supervisor.events("exited")[0]["raw"] == -9
    account.expect_nothing_left()
