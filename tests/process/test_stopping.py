"""Stopping in order, with the stand-in engine: what was accepted finishes, what comes late is told so."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from fakes.supervisor_process import Account, Client, StartMock, Supervisor, command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_open_stream_completes_and_a_late_request_is_told_draining(
    number: signal.Signals, start_mock: StartMock, account: Account
) -> None:
    """After the signal the open stream still ends with [DONE], a late request gets 503 draining, and nothing is left."""
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=30.0, what="ready")
    with client.stream(max_tokens=60, ignore_eos=True) as stream:
        next(stream)
        supervisor.signal(number)
        supervisor.until(lambda: client.get("/readyz").status_code == 503, within=10.0, what="admission closed")
        late = client.chat()
        assert late.status_code == 503, late.text
        assert late.json()["error"]["code"] == "draining"
        assert "Retry-After" in late.headers
        assert client.get("/livez").status_code == 200
        assert list(stream)[-1] == "[DONE]"
    assert supervisor.ends(within=20.0) == (0 if number == signal.SIGTERM else -signal.SIGINT), supervisor.words()
    account.expect_nothing_left()


def test_stop_by_the_tool_does_what_the_signal_does(start_mock: StartMock, account: Account) -> None:
    """`vllm-supervisor stop` ends the instance it names with status 0."""
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=30.0, what="ready")
    assert account.tool("--name", str(client.port), "stop").returncode == 0
    assert supervisor.ends(within=20.0) == 0, supervisor.words()
    account.expect_nothing_left()


def test_who_follows_the_events_sees_the_end(start_mock: StartMock, account: Account) -> None:
    """`events --follow` shows the events of a stop to the very last, which has the status, and returns 0."""
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=30.0, what="ready")
    follow = [*command(), "--name", str(client.port), "events", "--follow"]
    with subprocess.Popen(follow, env=account.env, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline()
        supervisor.signal(signal.SIGTERM)
        assert following.stdout.read().splitlines()[-1].endswith("; status 0")
    assert following.returncode == 0
    assert supervisor.ends(within=20.0) == 0, supervisor.words()


def cut(start_mock: StartMock, order: Callable[[Supervisor, Client], None]) -> tuple[Supervisor, list[str]]:
    """Give `order` while a stream without end is open, with a budget of 300 ms; return what that stream was told."""
    supervisor, client = start_mock("--max-model-len", "1m", before=("--set", "drain.budget=300ms"))
    supervisor.until(client.is_ready, within=30.0, what="ready")
    got: list[str] = []
    with client.stream(max_tokens=100_000, ignore_eos=True) as stream:
        got.append(next(stream))
        order(supervisor, client)
        with pytest.raises(httpx.TransportError):  # the connection is aborted after the error event
            got.extend(stream)
    return supervisor, got


def test_a_drain_that_ends_by_its_budget_cuts_explicitly_and_exits_80(start_mock: StartMock, account: Account) -> None:
    """What is still open when the budget ends gets an error event, never a [DONE] of ours, and the status says cut."""
    supervisor, got = cut(start_mock, lambda supervisor, _: supervisor.signal(signal.SIGTERM))
    assert '"code":"drain_deadline"' in got[-1].replace(" ", ""), got[-3:]
    assert supervisor.ends(within=20.0) == 80, supervisor.words()
    account.expect_nothing_left()


def test_who_waits_for_a_drain_hears_that_it_was_cut(start_mock: StartMock, account: Account) -> None:
    """`drain --wait` during a stop whose budget cuts a stream is 1 and says so; so does the last line of the log."""

    def stop(supervisor: Supervisor, client: Client) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(account.tool, "--name", str(client.port), "drain", "--wait", "--timeout", "60s")
            supervisor.until_said("admission closed by")
            supervisor.signal(signal.SIGTERM)
            done = waiting.result()
        assert (done.returncode, "but 1 request was cut" in done.stderr) == (1, True), done

    supervisor, _ = cut(start_mock, stop)
    assert supervisor.ends(within=20.0) == 80, supervisor.words()
    (last,) = supervisor.events("ended")
    assert last["level"] == "warning"
    assert "; cut 1 (chat 1, oldest " in last["sentence"]
    assert last["sentence"].endswith("; status 80")


def test_a_restart_whose_time_ends_does_not_speak_of_a_stop(start_mock: StartMock, account: Account) -> None:
    """What an ordered restart cuts is told that the time to finish is over, and not that the server stops."""

    def restart(_: Supervisor, client: Client) -> None:
        assert account.tool("--name", str(client.port), "restart", "--reason", "a test").returncode == 0

    _, got = cut(start_mock, restart)
    told = json.loads(got[-1].removeprefix("data: "))["error"]
    assert (told["code"], told["message"]) == ("drain_deadline", "the time to finish accepted requests is over")


def test_a_second_signal_ends_the_drain_now(start_mock: StartMock, account: Account) -> None:
    """With a long budget and an endless stream, a TERM more than a second later ends it within the engine's stop budget."""
    supervisor, client = start_mock("--max-model-len", "1m", before=("--set", "drain.budget=10m"))
    supervisor.until(client.is_ready, within=30.0, what="ready")
    with client.stream(max_tokens=100_000, ignore_eos=True) as stream:
        next(stream)
        supervisor.signal(signal.SIGTERM)
        supervisor.until(lambda: client.get("/readyz").status_code == 503, within=10.0, what="admission closed")
        new_wish = time.monotonic() + 1.05  # within a second of the first it would count once with it
        supervisor.until(lambda: time.monotonic() > new_wish, within=5.0, what="a second")
        again = time.monotonic()
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ends(within=20.0) == 80, supervisor.words()
    assert time.monotonic() - again < 10.0
    account.expect_nothing_left()
