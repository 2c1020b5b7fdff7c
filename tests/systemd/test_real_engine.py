"""Real vLLM under the shipped unit and a real systemd. The tests share one unit and run in the order they stand."""

import concurrent.futures
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.machine import Deaths
from fakes.ports import free_port
from fakes.rig import Rig, Unit, lives
from fakes.streams import Streams
from fakes.supervisor_process import Client
from fakes.tiny_engine import START, TinyEngine
from vllm_supervisor.core.proc import parse_stat

pytestmark = [pytest.mark.systemd, pytest.mark.engine]

MODEL = "/opt/models/tiny"
ALL = 20  # streams at once, all of them running in the engine


@pytest.fixture(scope="module")
def engine() -> TinyEngine:
    """Give real vLLM."""
    return TinyEngine.installed()


@pytest.fixture(scope="module")
def vllm_rig(engine: TinyEngine) -> Iterator[Rig]:
    """Boot a systemd that sees vLLM and its model."""
    rig = Rig(*engine.places)
    for file in engine.model.iterdir():
        rig.write(f"{MODEL}/{file.name}", file.read_text())
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def unit(engine: TinyEngine, vllm_rig: Rig) -> Iterator[Unit]:
    """Give the shipped unit with nothing changed but its environment file."""
    env = (f"VLLM_SUPERVISOR_ENGINE__COMMAND={engine.vllm}", *(f"{name}={value}" for name, value in engine.env.items()))
    with Unit(vllm_rig, free_port(), " ".join((*engine.options, "--max-num-seqs", str(ALL))), env, model=MODEL) as unit:
        yield unit


def test_start_returns_when_the_model_answers(unit: Unit) -> None:
    """The status text tells how the load goes, the first request after `start` is answered, and it is no one's user."""
    texts: set[str] = set()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        start = pool.submit(unit.start, within=START)
        while not concurrent.futures.wait([start], timeout=0.5).done:
            texts.add(unit.show("StatusText"))
        start.result()
    with Client(unit.port) as client:
        assert client.chat().status_code == 200
    assert len([text for text in texts if text.startswith("starting 0:")]) >= 5, texts
    assert len({text.partition(" ")[2].partition(" ")[2] for text in texts} - {""}) >= 2, (
        texts
    )  # what vLLM does just now
    assert Path(f"/proc/{unit.pid}").stat().st_uid >= 61184  # a dynamic user (systemd.exec(5))
    engine = unit.status()["engine"]
    assert {process["name"] for process in engine["processes"]} >= {"VLLM::EngineCore", "VLLM::Worker"}
    unit.until(lambda: unit.status()["engine"]["beacon"], within=20.0, what="true steps, through the hardening")
    assert "120 s allowed by TimeoutStopSec in the files of" in unit.journal()


def test_a_killed_core_is_restarted_by_us_and_by_nobody_else(unit: Unit) -> None:
    """KILL of EngineCore, after which vLLM ends with 0: we start it again, it serves, and systemd has seen nothing."""
    with Client(unit.port) as client:
        os.kill(unit.rig.named(unit.name, "VLLM::EngineCore"), signal.SIGKILL)
        unit.until(
            lambda: client.is_ready() and unit.status()["engine"]["incarnation"] == 2, within=START, what="engine 2"
        )
        assert client.chat().status_code == 200
    assert (unit.show("ActiveState"), unit.show("NRestarts")) == ("active", "0")


def started(pid: int) -> float:
    """Give the moment a process was started (seconds of CLOCK_BOOTTIME, in hundredths)."""
    return parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).id.start_ticks / os.sysconf("SC_CLK_TCK")


def test_a_killed_supervisor_is_restarted_when_its_engine_is_gone(unit: Unit) -> None:
    """SIGKILL to us: systemd starts us again, after the last process of the old engine has ended, and it serves."""
    old = unit.pids()
    family = Deaths(old)
    os.kill(unit.pid, signal.SIGKILL)
    last = family.last(within=20.0) - time.monotonic() + time.clock_gettime(time.CLOCK_BOOTTIME)
    new = unit.until(lambda: unit.pids() - old, within=20.0, what="the next life")
    assert min(map(started, new)) > last - 0.02
    with Client(unit.port) as client:
        unit.until(client.is_ready, within=START, what="ready again")
        assert client.chat().status_code == 200
    assert (unit.show("ActiveState"), unit.show("NRestarts")) == ("active", "1")


def test_a_stop_with_open_streams_loses_none(unit: Unit) -> None:
    """Twenty open streams all complete after `systemctl stop`, which reports success and leaves no process."""
    group = unit.rig.path(f"/sys/fs/cgroup{unit.show('ControlGroup')}")
    before = unit.pids()
    with Streams(unit.port, ALL, max_tokens=800, ignore_eos=True) as streams:
        assert not any(seen.complete for seen in streams.seen)
        done = unit.rig.run("systemctl", "stop", unit.name, within=130.0)
    assert done.returncode == 0, done.stderr
    assert all(seen.complete for seen in streams.seen), [seen for seen in streams.seen if not seen.complete][:3]
    assert (unit.show("Result"), unit.show("ExecMainStatus"), unit.show("ActiveState")) == ("success", "0", "inactive")
    assert not group.exists()
    assert not [pid for pid in before if lives(pid)]
