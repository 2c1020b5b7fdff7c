"""Real vLLM under the shipped unit and a real systemd. The tests share one unit and run in the order they stand.

Beside it a bare `vllm serve` starts at the same time, in a unit as people write it.
"""

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
ALL = 20  # streams at once; eight run, the others wait in the engine


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
    with Unit(vllm_rig, free_port(), " ".join(engine.options), env, model=MODEL) as unit:
        yield unit


class Bare:
    """A unit that runs `vllm serve` itself."""

    name = "bare.service"

    def __init__(self, rig: Rig, engine: TinyEngine) -> None:
        """Write it."""
        self.rig, self.port = rig, free_port()
        env = "".join(f"Environment={name}={value}\n" for name, value in engine.env.items())
        serve = f"{engine.vllm} serve {MODEL} --host 127.0.0.1 --port {self.port} {' '.join(engine.options)}"
        rig.write(f"/run/systemd/system/{self.name}", f"[Service]\nRestart=on-failure\n{env}ExecStart={serve}\n")

    def show(self) -> list[str]:
        """Give its ActiveState, Result, ExecMainStatus and NRestarts."""
        names = ("ActiveState", "Result", "ExecMainStatus", "NRestarts")
        lines = self.rig.systemctl("show", f"--property={','.join(names)}", self.name).splitlines()
        found = dict(line.split("=", 1) for line in lines)
        return [found[name] for name in names]


@pytest.fixture(scope="module")
def bare(engine: TinyEngine, vllm_rig: Rig) -> Bare:
    """Give one that has just been started."""
    bare = Bare(vllm_rig, engine)
    vllm_rig.systemctl("start", bare.name)
    return bare


def test_start_returns_when_the_model_answers(unit: Unit, bare: Bare) -> None:
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


def test_a_killed_core_is_restarted_by_us_and_by_nobody_without_us(unit: Unit, bare: Bare) -> None:
    """KILL of EngineCore: bare vLLM ends with 0, which is success to systemd, and stays down; under us it serves again."""
    rig = unit.rig
    with Client(bare.port) as client:
        unit.until(lambda: client.listens() and client.get("/health").status_code == 200, within=START, what="bare")
    bare_family = Deaths(rig.pids(bare.name))
    for one in (bare.name, unit.name):
        os.kill(rig.named(one, "VLLM::EngineCore"), signal.SIGKILL)
    bare_family.last(within=60.0)
    unit.until(lambda: bare.show() == ["inactive", "success", "0", "0"], within=20.0, what="the bare one down")
    with Client(unit.port) as client:
        unit.until(
            lambda: client.is_ready() and unit.status()["engine"]["incarnation"] == 2, within=START, what="engine 2"
        )
        assert client.chat().status_code == 200
    assert (unit.show("ActiveState"), unit.show("NRestarts")) == ("active", "0")
    assert bare.show() == ["inactive", "success", "0", "0"]


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
    with Client(unit.port) as client, Streams(unit.port, ALL, first=8, max_tokens=600, ignore_eos=True) as streams:
        unit.until(
            lambda: f"requests_in_flight {ALL}\n" in client.get("/metrics").text, within=20.0, what="twenty in flight"
        )
        done = unit.rig.run("systemctl", "stop", unit.name, within=130.0)
    assert done.returncode == 0, done.stderr
    assert all(seen.complete for seen in streams.seen), [seen for seen in streams.seen if not seen.complete][:3]
    assert (unit.show("Result"), unit.show("ExecMainStatus"), unit.show("ActiveState")) == ("success", "0", "inactive")
    assert not group.exists()
    assert not [pid for pid in before if lives(pid)]
