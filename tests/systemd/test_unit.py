"""The shipped unit under a real systemd, with the stand-in engine: starts, stops, and who restarts what."""

import os
import signal
import socket
import time

import pytest

from fakes.freeze import main_thread_stopped
from fakes.ports import free_port
from fakes.rig import Rig, Unit, lives
from fakes.streams import Streams
from fakes.supervisor_process import Client

pytestmark = pytest.mark.systemd

LONG = "--max-model-len 1m"  # for streams that outlast every budget


def test_the_shipped_unit_serves_as_it_is(rig: Rig) -> None:
    """Nothing but the environment file is needed; `start` returns when the model answers, and it runs as no one's user."""
    with Unit(rig, free_port()) as unit, Client(unit.port) as client:
        unit.start()
        assert client.chat().status_code == 200, unit.words()
        assert os.stat(f"/proc/{unit.pid}").st_uid >= 61184  # noqa: PTH116 - a dynamic user (systemd.exec(5))
        status = unit.status()
        assert {process["name"] for process in status["engine"]["processes"]} >= {"VLLM::EngineCore", "VLLM::Worker"}
        stranger = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        told = rig.run(*stranger, "/opt/vllm-supervisor/bin/vllm-supervisor", "status", "--name", str(unit.port))
        assert (told.returncode, "not accessible to you: use sudo" in told.stderr) == (1, True), told
        before = unit.pids()
        rig.systemctl("stop", unit.name)
        assert (unit.show("Result"), unit.show("ExecMainStatus"), unit.show("ActiveState")) == (
            "success",
            "0",
            "inactive",
        )
        assert not [pid for pid in before if lives(pid)]


def test_our_lines_in_the_journal_carry_their_priority(rig: Rig) -> None:
    """A warning is one for journalctl, without a prefix in its text; the engine's lines are what systemd makes of them."""
    with Unit(rig, free_port(), env=("VLLM_SUPERVISOR_DRAIN_BUDGET=5s",)) as unit:
        unit.start()
        grave = rig.run("journalctl", "--output=cat", f"--unit={unit.name}", "--priority=warning").stdout
        assert "VLLM_SUPERVISOR_DRAIN__BUDGET was probably meant" in grave
        assert "listening on" not in grave
        assert "<4>" not in unit.journal()
        assert "<6>" not in unit.journal()
        assert "listening on" in unit.journal()


@pytest.mark.parametrize(
    ("user", "where"),
    [
        ({}, "in the files of"),  # a dynamic user, which dbus-daemon does not let in
        ({"DynamicUser": "no", "User": "nobody"}, "of"),  # over D-Bus
        ({"DynamicUser": "no"}, "of"),  # root, without D-Bus
    ],
    ids=["as shipped", "a user", "root"],
)
def test_the_limit_of_the_unit_is_read_and_the_drain_fits_into_it(rig: Rig, user: dict[str, str], where: str) -> None:
    """Whoever we run as, `timeouts` names the unit's TimeoutStopSec; too short, the drain shrinks, which is status 1."""
    with Unit(rig, free_port(), TimeoutStopSec="50s", **user) as unit:
        unit.start()
        limits = unit.tool("timeouts")
        told = f"allowed by TimeoutStopSec {where} {unit.name}: the drain is shortened from 60 s to 10 s"
        assert told in limits.stdout, limits.stdout
        assert limits.returncode == 1


def test_a_load_longer_than_the_limit_is_not_killed_and_is_seen(rig: Rig) -> None:
    """A start that outlasts TimeoutStartSec becomes active when the engine is ready; the status text tells how it goes."""
    with Unit(rig, free_port(), "--mock-start-time 12s", TimeoutStartSec="8s") as unit:
        began = time.monotonic()
        unit.start(wait=False)
        texts = set()
        while (state := unit.show("ActiveState")) == "activating":
            texts.add(unit.show("StatusText"))
            assert time.monotonic() - began < 40.0, unit.words()
        assert state == "active", unit.words()
        assert time.monotonic() - began > 12.0
        assert len([text for text in texts if text.startswith("starting 0:0")]) >= 4, texts
        assert unit.show("NRestarts") == "0"


def test_a_load_that_stands_still_ends_by_our_own_deadline(rig: Rig) -> None:
    """No progress for engine.start_timeout: the unit fails with that reason and is not started again."""
    env = ("VLLM_SUPERVISOR_ENGINE__START_TIMEOUT=10s", "VLLM_SUPERVISOR_RESTART__START_ATTEMPTS=1")
    with Unit(rig, free_port(), "--mock-fault slow_start=10m", env, TimeoutStartSec="8s") as unit:
        unit.start(wait=False)
        unit.until_state("failed", within=40.0)
        assert (unit.show("Result"), unit.show("NRestarts")) == ("exit-code", "0")
        assert unit.show("ExecMainStatus") in {"69", "78"}
        assert "gave up" in unit.show("StatusText")
        assert "progress" in unit.show("StatusText"), unit.words()


def test_a_mistyped_option_fails_the_unit_at_once(rig: Rig) -> None:
    """The start fails within seconds, the journal holds the line, the status text its class; nothing is started again."""
    with Unit(rig, free_port(), "--mock-typo") as unit:
        began = time.monotonic()
        assert rig.run("systemctl", "start", unit.name).returncode != 0
        assert time.monotonic() - began < 15.0
        assert (unit.show("ActiveState"), unit.show("ExecMainStatus"), unit.show("NRestarts")) == ("failed", "78", "0")
        assert "unrecognized arguments: --mock-typo" in unit.journal()
        assert "unknown option" in unit.show("StatusText"), unit.show("StatusText")


def test_a_stop_with_open_streams_loses_none(rig: Rig) -> None:
    """Twenty open streams all complete after `systemctl stop`, which reports success and leaves no process."""
    with Unit(rig, free_port(), "--mock-tokens-per-second 20") as unit:
        unit.start()
        group = rig.path(f"/sys/fs/cgroup{unit.show('ControlGroup')}")
        with Streams(unit.port, 20, max_tokens=60, ignore_eos=True) as streams:
            rig.systemctl("stop", unit.name)
            assert all(seen.complete for seen in streams.seen), [seen for seen in streams.seen if not seen.complete][:3]
        assert (unit.show("Result"), unit.show("ExecMainStatus")) == ("success", "0")
        assert not group.exists()


def test_cut_requests_are_a_failure_that_systemd_leaves_alone(rig: Rig) -> None:
    """`vllm-supervisor stop` that cuts ends with 80; systemd shows the failure and does not restart."""
    with Unit(rig, free_port(), LONG, ("VLLM_SUPERVISOR_DRAIN__BUDGET=300ms",)) as unit:
        unit.start()
        with Streams(unit.port, 2, max_tokens=100_000, ignore_eos=True):
            assert unit.tool("stop").returncode == 0
            unit.until_state("failed")
        assert (unit.show("ExecMainStatus"), unit.show("NRestarts")) == ("80", "0")


def test_term_to_everybody_costs_only_what_the_engine_drops(rig: Rig) -> None:
    """KillMode=control-group: every client is told explicitly, no answer looks whole that is not, nothing is left."""
    with Unit(rig, free_port(), LONG, KillMode="control-group") as unit:
        unit.start()
        before = unit.pids()
        with Streams(unit.port, 5, max_tokens=100_000, ignore_eos=True) as streams:
            rig.systemctl("stop", unit.name)
        assert not any(seen.complete for seen in streams.seen)
        assert not [pid for pid in before if lives(pid)]
        summary = rig.run(
            "/opt/vllm-supervisor/bin/vllm-supervisor",
            "ledger",
            "audit",
            "--state-dir",
            f"/var/lib/vllm-supervisor/{unit.port}",
        )
        assert summary.returncode == 0, summary.stdout + summary.stderr


def test_a_killed_supervisor_is_restarted_after_its_engine_is_gone(rig: Rig) -> None:
    """SIGKILL to us: systemd starts us again, and no process of the old engine lives when the new one starts."""
    with Unit(rig, free_port()) as unit, Client(unit.port) as client:
        unit.start()
        old = unit.pids()
        os.kill(unit.pid, signal.SIGKILL)
        unit.until(lambda: unit.show("NRestarts") == "1" and unit.pids() - old, within=20.0, what="the next life")
        assert not [pid for pid in old if lives(pid)]
        unit.until(client.is_ready, within=20.0, what="ready again")


def test_a_deadlocked_loop_is_ended_by_the_watchdog(rig: Rig) -> None:
    """Our loop's thread stands still while all else runs: WatchdogSec acts, the engine dies with us, and we start again."""
    with Unit(rig, free_port(), WatchdogSec="2s") as unit, Client(unit.port) as client:
        unit.start()
        old = unit.pids()
        with main_thread_stopped(unit.pid) as frozen:
            unit.until(lambda: unit.show("Result") == "watchdog", within=20.0, what="the watchdog")
            unit.until(frozen.gone, within=20.0, what="killed")
            unit.until(lambda: not [pid for pid in old if lives(pid)], within=20.0, what="the old engine gone")
        unit.until(lambda: unit.show("NRestarts") == "1", within=20.0, what="the next life")
        unit.until(client.is_ready, within=20.0, what="ready again")


def test_an_engine_that_ends_with_0_is_restarted_by_us_and_by_nobody_else(rig: Rig) -> None:
    """A killed EngineCore: bare `vllm serve` ends with 0, "success" to systemd, and stays down; under us it comes back."""
    options = "serve tiny --host 127.0.0.1 --mock-death-time 500ms"
    bare_port = free_port()
    rig.write(
        "/run/systemd/system/bare.service",
        f"[Service]\nRestart=on-failure\nExecStart=/opt/vllm/bin/vllm {options} --port {bare_port}\n",
    )
    with (
        Unit(rig, free_port(), "--mock-death-time 500ms") as unit,
        Client(unit.port) as client,
        Client(bare_port) as bare,
    ):
        rig.systemctl("start", "bare.service")
        unit.start()
        unit.until(lambda: bare.listens() and bare.get("/health").status_code == 200, within=15.0, what="the bare one")
        show = ("systemctl", "show", "--value", "--property=ActiveState,Result,NRestarts", "bare.service")
        for one in ("bare.service", unit.name):
            os.kill(rig.named(one, "VLLM::EngineCore"), signal.SIGKILL)
        unit.until(
            lambda: set(rig.run(*show).stdout.split()) == {"inactive", "success", "0"},
            within=20.0,
            what="the bare one down",
        )
        unit.until(
            lambda: unit.status()["engine"]["incarnation"] == 2 and client.is_ready(), within=20.0, what="engine 2"
        )
        assert unit.show("NRestarts") == "0"


def test_a_reload_keeps_the_process_and_the_engine(rig: Rig) -> None:
    """`systemctl reload` succeeds, is seen in the journal, and the unit is active again with the same processes."""
    with Unit(rig, free_port()) as unit:
        unit.start()
        before = unit.pids()
        rig.systemctl("reload", unit.name)
        unit.until(lambda: "reloading what can change" in unit.journal(), within=10.0, what="the reload")
        unit.until_state("active")
        assert unit.pids() == before


def test_with_the_socket_unit_no_connection_is_refused_during_a_restart(rig: Rig) -> None:
    """A thousand connects while the service restarts all succeed, and the last of them is answered."""
    port = free_port()
    with Unit(rig, port) as unit, Client(port) as client:
        rig.systemctl("start", f"vllm-supervisor@{port}.socket")
        unit.start()
        assert "(given by " in str(unit.status()["listen"])
        rig.systemctl("restart", "--no-block", unit.name)
        made = []
        for _ in range(1000):
            made.append(socket.create_connection(("127.0.0.1", port), 5.0))
            time.sleep(0.002)  # spread over the restart, which takes about two seconds
            if len(made) == 500:
                unit.until(lambda: unit.show("ActiveState") != "active", within=10.0, what="the restart has begun")
        for one in made:
            one.close()
        unit.until_state("active")
        unit.until(client.is_ready, within=20.0, what="ready again")
        assert client.chat().status_code == 200
