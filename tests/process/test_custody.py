"""Custody with the stand-in engine: ends nobody asked for, what they leave behind, and the end of every loop."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, StartMock, Supervisor, command

QUICK = ("--set", "restart.backoff=20ms", "--set", "restart.backoff_max=50ms")
AT_ONCE = ("--mock-start-time", "0s")


def segment_of(supervisor: Supervisor) -> Path:
    """Give the segment in /dev/shm that the running EngineCore maps; others of the machine are not looked at."""

    def look() -> Path | None:
        maps = Path(f"/proc/{supervisor.named('VLLM::EngineCore').pid}/maps").read_text()
        found = re.search(r" (/dev/shm/psm_\w+)$", maps, re.MULTILINE)
        return Path(found[1]) if found else None

    return supervisor.until(look, within=10.0, what="a segment that is mapped")


def name_of(client: Client) -> str:
    """Give the name of the supervisor that `client` speaks to: others may run on the machine."""
    return client.url.rpartition(":")[2]


@contextmanager
def control(account: Account, client: Client) -> Iterator[httpx.Client]:
    """Give an HTTP client on the control socket of the supervisor that `client` speaks to."""
    path = account.home / "run" / "vllm-supervisor" / name_of(client) / "control.sock"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://control", timeout=10) as http:
        yield http


def restarts(account: Account, client: Client) -> dict[str, Any]:
    """Give the part of the status that tells the restarts."""
    with control(account, client) as http:
        told: dict[str, Any] = http.get("/status").json()["restarts"]
    return told


def expect_parked(supervisor: Supervisor, client: Client, *words: str, label: str) -> None:
    """Fail unless the address says that the engine is parked and names the class `label`, and the log says `words`."""
    parked = supervisor.until(lambda: supervisor.events("parked"), within=10.0, what="parked")[-1]["sentence"]
    assert [word for word in words if word not in parked] == []
    refused = client.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_parked")
    assert refused.headers["Retry-After"] == "300"
    shown = client.get("/readyz")
    assert shown.status_code == 503
    assert refused.json()["error"]["message"] == shown.json()["reason"]
    assert label in shown.json()["reason"]
    assert client.get("/livez").status_code == 200
    assert client.get("/startupz").status_code == 200


def test_ten_crashes_in_a_row_end_and_a_person_or_a_reload_begins_anew(start_mock: StartMock, account: Account) -> None:
    """The fourth crash parks; `restart` and a reload leave that with fresh budgets."""
    supervisor, client = start_mock(*AT_ONCE, before=QUICK)
    for crash in range(10):
        supervisor.until(lambda: client.is_ready() or supervisor.events("parked"), within=15.0, what="ready or parked")
        if supervisor.events("parked"):
            break
        with control(account, client) as http:
            os.kill(http.get("/status").json()["engine"]["pid"], signal.SIGSEGV)
        supervisor.until(lambda ends=crash + 1: len(supervisor.events("exited")) == ends, within=10.0, what="its end")
    assert len(supervisor.events("spawned")) == 4
    expect_parked(supervisor, client, "crash 4", "SIGSEGV", label="the engine failed: it crashed; ")
    told = restarts(account, client)
    assert (told["total"], told["by_cause"], told["budget"]["used"]) == (3, {"crashed": 3}, 4)
    assert 'vllm_supervisor_restarts_total{cause="crashed"} 3' in client.get("/metrics").text
    supervisor.signal(signal.SIGHUP)
    supervisor.until(client.is_ready, within=15.0, what="ready after a reload")
    assert restarts(account, client)["budget"]["used"] == 0
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    account.expect_nothing_left()


def test_long_loads_and_short_lives_end_and_exit_0_is_a_crash(start_mock: StartMock, account: Account) -> None:
    """Crashes further apart than the window are one loop still, if no life was healthy.

    What outlives a main process goes with its shared memory, and the reading of the end is the one of `explain-exit`.
    """
    # After two answers it ends with 0 and leaves its children.
    loop = ("--mock-fault", "exit=0@2req", "--mock-fault", "own_session", "--mock-fault", "shm")
    window = ("--set", "restart.within=100ms", "--set", "restart.max=1")
    supervisor, client = start_mock(*loop, "--mock-start-time", "300ms", before=(*QUICK, *window))
    for life in (1, 2):
        supervisor.until(client.is_ready, within=15.0, what=f"engine {life} is ready")
        segment = segment_of(supervisor)

        def over(ends: int = life) -> bool:
            client.chat()
            return len(supervisor.events("exited")) == ends

        supervisor.until(over, within=10.0, what="its end after some answers")
        assert not segment.exists()
    supervisor.until(lambda: supervisor.events("parked"), within=10.0, what="parked")
    ends = supervisor.events("exited")
    assert [(end["raw"], end["cause"], end["level"]) for end in ends] == [(0, "exited", "error")] * 2
    told = [(swept["level"], "VLLM::EngineCore" in swept["sentence"]) for swept in supervisor.events("swept")]
    assert told == [("info", True)] * 2  # what is gone again is nothing to be warned of
    assert all("removed 1 shared-memory segment (" in swept["sentence"] for swept in supervisor.events("swept"))
    expect_parked(supervisor, client, "crash 2", label="the engine failed: ")
    explained = json.loads(account.tool("explain-exit", "0", "--json").stdout)["engine"]["serving"]
    assert explained["cause"] == ends[0]["cause"]
    assert ends[0]["sentence"].rpartition(": ")[2] == explained["sentence"].rpartition(": ")[2]


def test_each_part_may_die_under_load(start_mock: StartMock, account: Account) -> None:
    """Main process, EngineCore (with a main process that would never exit) and Worker: clients are told, all is replaced."""
    shape = ("--mock-fault", "shm", "--max-model-len", "1m", *AT_ONCE)
    supervisor, client = start_mock(*shape, before=(*QUICK, "--set", "restart.max=9"))
    causes = {"vllm": "killed", "VLLM::EngineCore": "part_died", "VLLM::Worker": "part_died"}
    for life, (name, cause) in enumerate(causes.items(), start=1):
        supervisor.until(client.is_ready, within=15.0, what=f"engine {life} is ready")
        assert client.post("/mock/fault", {"name": "wedged_exit"}).status_code == 200
        segment = segment_of(supervisor)
        got: list[str] = []
        with client.stream(max_tokens=100_000, ignore_eos=True) as stream, suppress(httpx.TransportError):
            got.append(next(stream))
            supervisor.named(name).kill()
            got.extend(stream)
        # Ours, before an aborted connection, or that of a main process which was quicker than we.
        assert "error" in json.loads(got[-2 if got[-1] == "[DONE]" else -1])
        end = supervisor.until(
            lambda life=life: supervisor.events("exited")[life - 1 :], within=10.0, what=f"the end of engine {life}"
        )[0]
        assert (end["cause"], end["requests_lost"]) == (cause, 1)
        assert not segment.exists()
        assert name == "vllm" or name in end["sentence"]
    supervisor.until(client.is_ready, within=15.0, what="the last engine is ready")
    told = restarts(account, client)
    assert told["by_cause"] == {"killed": 1, "part_died": 2}
    assert (told["last"]["cause"], told["last"]["requests_lost"]) == ("part_died", 1)
    assert 0 < told["last"]["ready_after_s"] < 15
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    account.expect_nothing_left()


def test_the_same_status_is_clean_after_our_term_and_a_crash_without_it(
    account: Account, start_mock: StartMock
) -> None:
    """-15 is read by what was asked."""
    crashed, _ = start_mock("--mock-fault", "signal=TERM@50ms", *AT_ONCE, before=("--set", "restart.max=0"))
    asked = account.start(
        "--set", f"listen.port={free_port()}", "run", "--", "/bin/sh", "-c", "exec sleep 600", "{port}"
    )
    asked.until(lambda: asked.events("spawned"), within=10.0, what="spawned")
    asked.signal(signal.SIGTERM)
    assert asked.ends(within=10.0) == 0, asked.words()
    end = asked.events("exited")[0]
    assert (end["raw"], end["cause"], end["level"]) == (-15, "requested", "info")
    crashed.until(lambda: crashed.events("parked"), within=15.0, what="parked")
    end = crashed.events("exited")[0]
    assert (end["raw"], end["cause"], end["level"]) == (-15, "killed", "error")


def adapter(account: Account, name: str) -> str:
    """Give the script of the page about watchdogs, for a server that does not answer it, told to supervisor `name`."""
    page = (Path(__file__).parents[2] / "docs" / "watchdogs.md").read_text(encoding="utf-8")
    script = page.partition("```sh\n")[2].partition("```")[0]
    assert len(script.splitlines()) == 2
    tool = account.home / "vllm-supervisor"
    tool.write_text(f'#!/bin/sh\nexec {shlex.join(command())} --name {name} "$@"\n', encoding="utf-8")
    tool.chmod(0o700)
    nobody = script.replace("127.0.0.1:8000", f"127.0.0.1:{free_port()}")
    return nobody.replace("    vllm-supervisor", f"    {tool}")


def test_eight_reports_restart_nothing(start_mock: StartMock, account: Account) -> None:
    """Each complaint is written down and answered with the verdict on the busy engine, whose work goes on.

    The first comes from the two lines that the documentation gives to an old watchdog.
    """
    supervisor, client = start_mock("--mock-tokens-per-second", "20", *AT_ONCE)
    supervisor.until(client.is_ready, within=10.0, what="ready")
    with client.stream(max_tokens=60, ignore_eos=True) as stream:
        next(stream)
        by_script = subprocess.run(
            ["/bin/sh", "-e", "-c", adapter(account, name_of(client))],
            env=account.env,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert by_script.stdout.startswith("recorded; busy"), by_script
        with control(account, client) as http:
            for number in range(7):
                answer = http.post("/report", json={"source": "cron", "reason": f"complaint {number}"})
                assert (answer.status_code, answer.json()["verdict"]) == (202, "busy")
                assert answer.json()["sentence"]
        assert list(stream)[-1] == "[DONE]"
    assert len(supervisor.events("report")) == 8
    assert "uid" in supervisor.events("report")[0]["sentence"]
    assert restarts(account, client)["total"] == 0
    assert len(supervisor.events("spawned")) == 1


def test_words_in_a_path_condemn_no_engine(start_mock: StartMock) -> None:
    """An access line with vLLM's own word for a dead engine in it is a client's, and is not believed."""
    supervisor, client = start_mock(*AT_ONCE)
    supervisor.until(client.is_ready, within=10.0, what="ready")
    client.get("/EngineDeadError")
    supervisor.until(lambda: "/EngineDeadError" in supervisor.out.text, within=10.0, what="the access line")
    assert not supervisor.events("engine_lost")


@pytest.mark.parametrize(
    ("mode", "terminal", "status"),
    [("auto", True, 78), ("auto", False, None), ("exit", False, 78), ("park", True, None)],
)
def test_a_start_that_cannot_succeed_is_tried_once(
    mode: str, terminal: bool, status: int | None, start_mock: StartMock, account: Account
) -> None:
    """In each mode one attempt, and the reason stands where the user looks: the last line, or address and status."""
    how = ("--set", f"restart.on_give_up={mode}", "--set", "log.format=json")
    supervisor, client = start_mock("--mock-fault", "error=missing_model@load", *AT_ONCE, before=how, terminal=terminal)
    if status is None:
        supervisor.until(lambda: supervisor.events("parked"), within=15.0, what="parked")
        expect_parked(supervisor, client, "the model", label="the engine failed to start: ")
        assert "the model" in account.tool("--name", name_of(client), "status").stdout
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ends(within=10.0) == 0, supervisor.words()
    else:
        assert supervisor.ends(within=15.0) == status, supervisor.words()
        assert "the model" in supervisor.shown()[-1]
    assert len(supervisor.events("spawned")) == 1
    account.expect_nothing_left()


def test_a_killed_supervisor_leaves_no_rival(start_mock: StartMock, account: Account) -> None:
    """The next start names what is left or ends it, clears it, becomes ready, and closes the books of the lost run."""
    shape = ("--mock-fault", "shm", "--max-model-len", "1m", *AT_ONCE)
    same = ("--name", "same")
    first, client = start_mock(*shape, before=same)
    first.until(client.is_ready, within=10.0, what="ready")
    segment = segment_of(first)
    with client.stream(max_tokens=100_000, ignore_eos=True) as stream:
        next(stream)
        first.kill()
    left = [process for process in account.leftovers() if process.name.startswith("VLLM")]
    assert segment.exists()
    assert len(left) == 2, "nothing was left behind, so nothing is shown"

    refused, _ = start_mock(*shape, before=(*same, "--set", "engine.sweep=false"))
    assert refused.ends(within=15.0) == 78, refused.words()
    last = refused.shown()[-1]
    assert all(f"pid {process.pid}" in last for process in left), last
    assert "engine.sweep" in last
    assert not refused.events("spawned")

    second, client = start_mock(*shape, before=same)
    second.until(client.is_ready, within=15.0, what="ready again")
    (swept,) = second.events("swept_earlier")
    assert all(f"pid {process.pid}" in swept["sentence"] for process in left)
    assert not set(left) & set(account.leftovers())
    assert not segment.exists()
    homes = {path.name.split("-")[1] for path in (account.home / "run/vllm-supervisor/same").glob("engine-*")}
    assert len(homes) == 1
    second.until(lambda: second.events("recovered"), within=10.0, what="recovered")
    assert "1 executions proven stopped, 0 unknown" in second.events("recovered")[0]["sentence"]
    second.signal(signal.SIGTERM)
    assert second.ends(within=10.0) == 0, second.words()
    audit = account.tool(*same, "ledger", "audit")
    assert audit.returncode == 0, audit
    account.expect_nothing_left()


UNKILLABLE = str(Path(__file__).parents[1] / "fakes" / "unkillable.py")


def test_what_kill_does_not_end_blocks_the_next_engine(start_mock: StartMock, account: Account) -> None:
    """No second engine beside it, 503 with the process named, and status 81 when we are told to stop."""
    supervisor, client = start_mock(*AT_ONCE, under=(sys.executable, UNKILLABLE), before=QUICK)
    supervisor.until(client.is_ready, within=10.0, what="ready")
    worker = supervisor.named("VLLM::Worker")
    os.kill(worker.pid, signal.SIGSTOP)  # it would end by itself otherwise
    supervisor.named("VLLM::EngineCore").kill()
    supervisor.until(lambda: supervisor.events("unkillable"), within=10.0, what="unkillable")
    refused = client.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unkillable")
    assert f"VLLM::Worker (pid {worker.pid})" in supervisor.events("unkillable")[0]["sentence"]
    assert str(worker.pid) not in refused.json()["error"]["message"]
    assert client.get("/readyz").json()["engine"] == "unkillable"
    assert len(supervisor.events("spawned")) == 1
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=10.0) == 81, supervisor.words()
    assert worker.is_running()
