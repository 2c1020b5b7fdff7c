"""The memory guard with real vLLM and this machine's own memory. All but the last share a supervisor, in this order.

The floor stands a few GiB below what was available before the start: the engine fits above it, and a second process that
takes memory, a bounded amount, crosses it while the machine has plenty.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes import eater
from fakes.machine import GIB, Deaths, Machine
from fakes.streams import Streams, load
from fakes.supervisor_process import Account, Client, Supervisor
from fakes.tiny_engine import START, TinyEngine

pytestmark = pytest.mark.engine

BELOW = 6 * GIB  # from what is available before the start down to the floor; the tiny engine takes about 2.5
SPARE = 6 * GIB  # what the machine keeps at least
TOLD_WITHIN = 1.0  # seconds from the look that crossed until the last client knows
DEAD_WITHIN = 0.150  # and until the last process of the engine is gone,
A_GIB_WITHIN = 0.100  # but that the kernel takes small pages back one by one: 0.06 to 0.1 s a GiB


@dataclass
class Guarded:
    """A supervisor that guards this machine; `floor` in bytes."""

    account: Account
    supervisor: Supervisor
    client: Client
    floor: int

    def status(self) -> dict[str, Any]:
        """What `status --json` says."""
        told: dict[str, Any] = json.loads(self.account.tool("--name", "guarded", "status", "--json").stdout)
        return told

    def metric(self, name: str) -> float:
        """Give the value of one of our memory's series."""
        wanted = f"vllm_supervisor_memory_{name} "
        [line] = [line for line in self.client.get("/metrics").text.splitlines() if line.startswith(wanted)]
        return float(line.removeprefix(wanted))


@pytest.fixture(scope="module")
def guarded(engine: TinyEngine, account: Account) -> Iterator[Guarded]:
    """Give the one supervisor of this module, its engine ready."""
    memory = psutil.virtual_memory()
    floor = memory.available - BELOW
    assert floor > SPARE + GIB, f"{memory.available / GIB:.1f} GiB available: too little for this test"
    share = f"{100 * floor / memory.total:.3f}%"
    keys = ("memory.mode=unified", f"memory.floor={share}", f"memory.low={share}", "restart.backoff=50ms")
    before = ("--name", "guarded", *(word for key in keys for word in ("--set", key)))
    supervisor, client = engine.serve(account, before=before)
    with client:
        supervisor.until(client.is_ready, within=START, what="ready")
        yield Guarded(account, supervisor, client, floor)


def test_a_start_and_traffic_above_the_floor_are_left_alone(guarded: Guarded) -> None:
    """Guarded from the spawn on, nothing is done; status and metrics show available, floor, slope and minimum."""
    port = guarded.client.port
    with load(port, 8) as answers, Streams(port, 4, max_tokens=600, ignore_eos=True) as streams:
        pass
    assert all(seen.complete for seen in streams.seen)
    assert set(answers) == {200}
    memory = guarded.status()["memory"]
    assert (memory["pressure"], memory["guard"]) == ("normal", "memory guard on: memory.mode is unified")
    assert memory["floor_bytes"] == pytest.approx(guarded.floor, rel=0.001)
    assert memory["floor_bytes"] < memory["minimum_bytes"] <= memory["available_bytes"] < psutil.virtual_memory().total
    assert isinstance(memory["slope_bytes_per_s"], int)
    assert memory["history"]
    assert guarded.metric("available_bytes") == pytest.approx(psutil.virtual_memory().available, rel=0.1)
    assert guarded.metric("floor_bytes") == memory["floor_bytes"]
    assert guarded.metric("minimum_bytes") <= memory["minimum_bytes"]
    assert abs(guarded.metric("slope_bytes_per_second")) < 4 * GIB
    assert 'vllm_supervisor_memory_pressure{level="normal"} 1' in guarded.client.get("/metrics").text
    assert not guarded.supervisor.events("memory_floor")
    assert len(guarded.supervisor.events("spawned")) == 1
    assert guarded.status()["engine"]["incarnation"] == 1


def own_memory(pid: int) -> int:
    """Give how much memory a process shares with nobody's file (bytes)."""
    [line] = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_the_floor_ends_the_engine_and_not_the_machine(guarded: Guarded) -> None:
    """Another process eats: the tree is dead at once, clients are told, and no engine starts before the memory is back."""
    supervisor, client = guarded.supervisor, guarded.client
    pids = [process.pid for process in supervisor.descendants()]
    dead_within = DEAD_WITHIN + A_GIB_WITHIN * sum(map(own_memory, pids)) / GIB
    family = Deaths(pids)
    bite = psutil.virtual_memory().available - guarded.floor + GIB
    assert psutil.virtual_memory().available - bite > SPARE
    with Streams(client.port, 8, max_tokens=30_000, ignore_eos=True) as streams:
        command = [sys.executable, eater.__file__, "alone", str(bite >> 20)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
            try:
                last = family.last(within=30.0)
            except AssertionError:
                supervisor.kill()  # else the streams, and with them this test, go on for minutes
                raise
            crossed = supervisor.until(lambda: supervisor.events("memory_floor"), within=10.0, what="the floor")[0]
            took = last - crossed["t"]
            words = f"{took * 1000:.1f} ms ({dead_within * 1000:.0f} allowed)"
            print(f"\nfrom the look that crossed to the last process dead: {words}")  # noqa: T201 - a measurement
            waits = supervisor.until(lambda: supervisor.events("memory_wait"), within=10.0, what="the gate")
            assert "before the last engine" in waits[0]["sentence"]
            assert guarded.status()["memory"]["waiting_for"].startswith("waiting for memory before the engine starts")
            refused = client.chat()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
            assert len(supervisor.events("spawned")) == 1
            other.kill()
    assert 0 < took < dead_within, supervisor.words()
    for seen in streams.seen:
        assert '"error"' in "".join(seen.data[-2:]), (seen.data[-2:], seen.error)
        assert seen.ended_at - crossed["t"] < TOLD_WITHIN
    supervisor.until(lambda: len(supervisor.events("spawned")) == 2, within=20.0, what="the next engine")
    log = [line["event"] for line in supervisor.log()]
    assert log.index("memory_wait") < log.index("memory_back") < log.index("spawned", log.index("memory_wait"))
    end = supervisor.events("exited")[0]
    assert (end["cause"], end["requests_lost"]) == ("out_of_memory", 8)
    [place] = (guarded.account.home / "state").glob("**/incident.json")
    incident = json.loads(place.read_text())
    assert "memory reached the floor" in incident["cause"]
    assert min(look["available_bytes"] for look in incident["memory"]) <= guarded.floor
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=40.0) == 0, supervisor.words()
    guarded.account.expect_nothing_left()


@pytest.fixture
def other_account(engine: TinyEngine) -> Iterator[Account]:
    """Give an account that shares nothing with the tests before."""
    with Account(engine.env) as account:
        yield account


def test_a_start_waits_for_memory_that_comes_late(engine: TinyEngine, other_account: Account) -> None:
    """Below `low` at the start: no process of vLLM exists until the memory is there, then it starts at once."""
    account = other_account
    machine = Machine(account.home)
    machine.available(9.0)  # low is 10.8 GiB
    supervisor, client = engine.serve(account, before=("--name", "late", *machine.options()))
    with client:
        waits = supervisor.until(lambda: supervisor.events("memory_wait"), within=20.0, what="the gate")
        assert "9.0 GiB available, 10.8 GiB wanted (the level memory.low of 120.0 GiB)" in waits[0]["sentence"]
        assert client.chat().json()["error"]["code"] == "engine_starting"
        assert not supervisor.descendants()
        assert not supervisor.events("spawned")
        machine.available(11.0)
        supervisor.until(lambda: supervisor.events("spawned"), within=10.0, what="spawned")
        supervisor.named("vllm")
        log = [line["event"] for line in supervisor.log()]
        assert log.index("memory_back") < log.index("spawned")
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ends(within=20.0) == 0, supervisor.words()
    account.expect_nothing_left()
