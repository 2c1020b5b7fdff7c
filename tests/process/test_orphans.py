"""Engines of other supervisors beside ours: those of dead ones are ended, those of living ones never."""

import json
import os
import signal

import psutil
import pytest

from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, StartMock, Supervisor, until


def engine_of(supervisor: Supervisor) -> list[psutil.Process]:
    """Give the processes of its engine."""
    supervisor.named("VLLM::EngineCore")
    return supervisor.descendants()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Give those that still run."""
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def kill(supervisor: Supervisor) -> None:
    """End it as a manager does that has waited long enough."""
    supervisor.signal(signal.SIGKILL)
    supervisor.process.wait(10.0)


def test_a_dead_supervisors_engine_is_ended_and_a_living_ones_is_not(start_mock: StartMock, account: Account) -> None:
    """Of three on ports of their own one is killed: the next start, on a fourth, ends that engine and no other."""
    (dead, was), (living, lives) = start_mock(), start_mock()
    for supervisor, client in ((dead, was), (living, lives)):
        supervisor.until(client.is_ready, within=30.0, what="ready")
    left, stays = engine_of(dead), engine_of(living)
    kill(dead)
    assert len(alive(left)) == len(left)
    told = account.tool("doctor", "--json", within=60.0)
    found = [one for one in json.loads(told.stdout)["findings"] if one["check"] == "orphans"]
    assert any(str(left[0].pid) in one["what"] for one in found), found
    assert not any(str(stays[0].pid) in one["what"] for one in found), found
    fresh, client = start_mock()
    fresh.until(client.is_ready, within=30.0, what="ready")
    assert not alive(left)
    [said] = fresh.events("swept_abandoned")
    assert all(str(one.pid) in said["sentence"] for one in left)
    assert len(alive(stays)) == len(stays)
    assert lives.chat().status_code == 200
    assert not living.events("engine_lost")


def test_two_that_start_at_once_end_it_once_and_spare_each_other(start_mock: StartMock) -> None:
    """Two starts beside one abandoned engine: it is gone, both get ready, and neither touches the other's engine."""
    dead, was = start_mock()
    dead.until(was.is_ready, within=30.0, what="ready")
    left = engine_of(dead)
    kill(dead)
    both = [start_mock(), start_mock()]
    for supervisor, client in both:
        supervisor.until(client.is_ready, within=30.0, what="ready")
    assert not alive(left)
    for supervisor, client in both:
        assert client.chat().status_code == 200
        assert len(supervisor.events("spawned")) == 1


@pytest.mark.parametrize("how", ["sweep off", "another domain", "unmarked"])
def test_what_may_not_be_ended_is_named_or_left_alone(how: str, start_mock: StartMock, account: Account) -> None:
    """With the sweep off, and where no supervisor is marked, it is named; another domain's is nobody's business here."""
    dead, was = start_mock()
    dead.until(was.is_ready, within=30.0, what="ready")
    left = engine_of(dead)
    kill(dead)
    own: tuple[str, ...] = ()
    if how == "sweep off":
        own = ("--set", "engine.sweep=false")
    elif how == "another domain":
        own = ("--set", "engine.sweep_domain=another")
    stranger = None
    if how == "unmarked":
        own = ("--set", "engine.sweep_domain=older")
        env = {"VSUP_INSTANCE": "0123", "VSUP_RUN": "4567", "VSUP_INCARNATION": "1", "VSUP_DOMAIN": "older"}
        stranger = psutil.Popen(["sleep", "600"], env={**os.environ, **env})
    try:
        fresh, client = start_mock(before=own)
        fresh.until(client.is_ready, within=30.0, what="ready")
        assert len(alive(left)) == len(left)
        told = account.tool("--name", str(client.port), "status", "--json")
        named = {one["pid"]: one["why"] for one in json.loads(told.stdout)["orphans"]}
        if stranger is not None:
            assert named == {stranger.pid: "it does not say who its supervisor is"}
        elif how == "sweep off":
            assert {one.pid for one in left} <= set(named)
            assert set(named.values()) == {"engine.sweep is off"}
        else:
            assert named == {}
        assert len(fresh.events("orphans")) == (0 if how == "another domain" else 1)
        shown = account.tool("--name", str(client.port), "status").stdout
        assert ("orphan" in shown) == bool(named)
    finally:
        if stranger is not None:
            stranger.kill()
            stranger.wait()


def test_a_killed_supervisors_successor_under_another_name(account: Account) -> None:
    """The same command under another name, its predecessor killed a moment ago: one engine is left, the new one."""
    port = free_port()
    words = ("--engine", "mock", "serve", "tiny", "--host", "127.0.0.1", "--port", str(port))
    with Client(port) as client:
        first = account.start("--name", "monday", *words)
        first.until(client.is_ready, within=30.0, what="ready")
        left = engine_of(first)
        kill(first)
        second = account.start("--name", "tuesday", *words)
        second.until(client.is_ready, within=30.0, what="ready")
        assert until(lambda: not alive(left), within=5.0, what="the first engine is gone")
        assert client.chat().status_code == 200
