"""Findings: each rule of the pre-flight speaks up for what it is about, with why and mend, and is silent otherwise."""

from dataclasses import replace

import pytest

from vllm_supervisor.core import doctor, doctor_engine, doctor_machine, doctor_rivals, doctor_units
from vllm_supervisor.core.doctor import Finding, Level, ok
from vllm_supervisor.core.doctor_engine import Installation
from vllm_supervisor.core.doctor_machine import GIB, Machine
from vllm_supervisor.core.doctor_rivals import Container, Source
from vllm_supervisor.core.doctor_units import FINAL, UnitFacts
from vllm_supervisor.core.vllm_args import VllmOptions

GOOD = {
    "ActiveState": "active",
    "Type": "notify",
    "KillMode": "mixed",
    "OOMPolicy": "continue",
    "Restart": "on-failure",
    "RestartPreventExitStatus": " ".join(map(str, FINAL)),
    "WatchdogUSec": "1min",
    "Delegate": "yes",
}
COMMAND = "/opt/vllm-supervisor/bin/vllm-supervisor --name 8000 --set drain.budget=9s serve tiny --port 8000"
MACHINE = Machine(
    shm_total=8 * GIB, shm_free=8 * GIB, shm_unused=(), shm_untold=0, files_soft=65536, files_hard=65536, memory_total=64 * GIB,
    memory_available=60 * GIB, gpus=("NVIDIA H100",), driver="580.1", year=2026, clock_synchronised=True,
    cgroup_version=2, delegated="", max_connections=4096, problems=(),
)  # fmt: skip


def facts(command: str = COMMAND, stop_s: float | None = 120.0, **properties: str) -> UnitFacts:
    """Give a good unit with some properties changed."""
    return UnitFacts("x.service", user=False, properties=GOOD | properties, command=command, environ={}, stop_s=stop_s)


def levels(findings: list[Finding]) -> list[Level]:
    """Give the levels; what is not well says why and what to do."""
    assert all(finding.why and finding.mend for finding in findings if finding.level is not Level.OK), findings
    return [finding.level for finding in findings]


def test_the_exit_status_is_the_gravest_level() -> None:
    """Notes leave it at 0, warnings make it 1, errors 2; JSON and text put the gravest first."""
    note, warning, error = (
        Finding(level, "x", level.value, "w", "m") for level in (Level.NOTE, Level.WARNING, Level.ERROR)
    )
    assert [
        doctor.exit_status(found) for found in ([], [ok("x", "fine"), note], [warning, note], [warning, error])
    ] == [0, 0, 1, 2]
    built = doctor.as_json([ok("x", "fine"), note, error])
    assert built["status"] == 2
    assert built["counts"] == {"ok": 1, "note": 1, "warning": 0, "error": 1}
    assert built["findings"][0] == {"level": "error", "check": "x", "what": "error", "why": "w", "mend": "m"}
    assert doctor.render([ok("x", "fine"), error]).splitlines()[0] == "error    error"


def test_the_statuses_that_must_not_be_restarted_are_ours() -> None:
    """Usage, every way of giving up, and every end that was asked for; not a fault of ours."""
    assert FINAL == (2, 69, 75, 78, 80, 81, 82)


@pytest.mark.parametrize(
    ("properties", "level", "words"),
    [
        ({}, Level.OK, "fits"),
        ({"KillMode": "control-group"}, Level.ERROR, "EngineCore"),
        ({"KillMode": "process"}, Level.WARNING, "lives on"),
        (
            {"ExecStop": "{ path=/bin/kill ; argv[]=/bin/kill -TERM $MAINPID ; ignore_errors=no }"},
            Level.WARNING,
            "ExecStop",
        ),
        ({"ExecStop": "{ path=/x ; argv[]=/opt/bin/vllm-supervisor --name 8000 stop ; }"}, Level.WARNING, "ExecStop"),
        ({"ExecStop": "{ path=/x ; argv[]=/opt/bin/vllm-supervisor drain --hook --wait ; }"}, Level.OK, "fits"),
        ({"ExecStop": "{ path=/x ; argv[]=/opt/bin/skill-report ; }"}, Level.OK, "fits"),
        ({"Type": "simple"}, Level.WARNING, "Type=notify"),
        ({"Type": "notify-reload"}, Level.OK, "fits"),
        ({"OOMPolicy": "stop"}, Level.WARNING, "OOMPolicy=continue"),
        ({"Restart": "always"}, Level.WARNING, "undone"),
        ({"Restart": "on-failure", "RestartPreventExitStatus": "2 69 75 78 81 82"}, Level.WARNING, "status 80"),
        ({"Restart": "no", "RestartPreventExitStatus": ""}, Level.OK, "fits"),
        ({"Restart": "on-watchdog", "RestartPreventExitStatus": ""}, Level.OK, "fits"),
        ({"WatchdogUSec": "0"}, Level.NOTE, "WatchdogSec=60s"),
        ({"WatchdogUSec": "0", "ActiveState": "inactive"}, Level.OK, "fits"),
        ({"Delegate": "no"}, Level.NOTE, "Delegate=yes"),
    ],
)
def test_each_property_of_a_unit_has_its_rule(properties: dict[str, str], level: Level, words: str) -> None:
    """One property changed gives exactly one finding, which names it or its mend."""
    findings = doctor_units.unit(facts(**properties), needed_s=100.0)
    assert levels(findings) == [level]
    assert words in f"{findings[0].what} {findings[0].why} {findings[0].mend}"


@pytest.mark.parametrize(("stop_s", "level"), [(99.0, Level.WARNING), (100.0, Level.OK), (None, Level.OK)])
def test_a_stop_limit_shorter_than_the_plan_is_said(stop_s: float | None, level: Level) -> None:
    """TimeoutStopSec is compared with what a stop takes by the configuration."""
    assert levels(doctor_units.unit(facts(stop_s=stop_s), needed_s=100.0)) == [level]


@pytest.mark.parametrize(
    ("command", "ours", "bare"),
    [
        (COMMAND, True, False),
        ("/usr/bin/python3 -m vllm_supervisor.cli serve tiny", True, False),
        ("/usr/bin/vllm-supervisor run -- server --uds {uds}", True, False),
        ("/usr/bin/vllm-supervisor status --watch", False, False),
        ("/opt/vllm/bin/vllm serve tiny", False, True),
        ("python -m vllm.entrypoints.openai.api_server", False, True),
        ("/usr/bin/sshd -D", False, False),
    ],
)
def test_our_units_and_bare_ones_are_told_apart(command: str, ours: bool, bare: bool) -> None:
    """By their command lines."""
    found = facts(command)
    assert (found.ours, found.bare) == (ours, bare)
    assert levels([doctor_units.bare(found)]) == [Level.WARNING]


def test_a_units_own_options_are_read() -> None:
    """What stands before `serve` is ours, what stands after it vLLM's."""
    assert facts().own_options() == {"--name": ["8000"], "--set": ["drain.budget=9s"]}
    assert facts().serve_arguments() == ["tiny", "--port", "8000"]
    assert facts("/bin/vllm-supervisor --config=/etc/x.toml run -- serve it").own_options() == {
        "--config": ["/etc/x.toml"]
    }


@pytest.mark.parametrize(
    ("text", "kind", "level"),
    [
        ("* * * * * root curl -fsS localhost:8000/health || systemctl restart vllm", "cron", Level.WARNING),
        ("* * * * * root pgrep -f 'vllm serve' || reboot", "cron", Level.WARNING),
        ("#!/bin/sh\ncurl -s http://127.0.0.1:8000/v1/models ||\n  docker restart llm\n", "script", Level.WARNING),
        ("pkill -9 -f VLLM::EngineCore", "script", Level.WARNING),
        ("fuser -k 8000/tcp", "script", Level.WARNING),
        ("[Service]\nExecStart=/bin/sh -c 'systemctl restart vllm-supervisor@8000'", "unit", Level.WARNING),
        ("[program:llm]\ncommand=vllm serve x\nautorestart=true", "watchdog", Level.WARNING),
        ("*/5 * * * * root curl -s localhost:8000/metrics > /tmp/x", "cron", Level.NOTE),
        (f"[Service]\nExecStart={COMMAND}\nExecStop=/bin/kill $MAINPID", "unit", Level.OK),
        (
            "# curl localhost:8000/health || systemctl restart vllm\n17 * * * * root run-parts /etc/cron.hourly",
            "cron",
            Level.OK,
        ),
        ("* * * * * root systemctl restart nginx; curl localhost:80001/", "cron", Level.OK),
        ("[Service]\nExecReload=/bin/kill -HUP $MAINPID\nExecStart=/usr/sbin/sshd", "unit", Level.OK),
        ("[Service]\nExecStart=/opt/vllm/bin/vllm serve x\nRestart=always", "unit", Level.OK),  # systemctl tells of it
    ],
)
def test_a_rival_names_us_and_acts(text: str, kind: str, level: Level) -> None:
    """Acting on us is a warning, asking us a note, and neither a comment nor somebody else's restart is anything."""
    findings = doctor_rivals.rivals([Source("/etc/x", kind, text)], [8000])
    assert levels(findings) == [level], findings


def test_restart_policies_of_containers() -> None:
    """A container that starts vLLM again for ever is a rival; one with us inside is worth a note."""
    bare = Container("llm", "always", "vllm/vllm-openai vllm serve x")
    ours = Container("llm", "unless-stopped", "mine vllm-supervisor serve x")
    others = [Container("db", "always", "postgres"), replace(bare, restart="no")]
    assert levels(doctor_rivals.containers([bare, ours, *others], [8000])) == [Level.WARNING, Level.NOTE]


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (Installation("/v/bin/vllm", "0.32.0+cpu", "", ""), Level.OK),
        (Installation("/v/bin/vllm", "0.11.0", "", ""), Level.NOTE),
        (Installation("/v/bin/vllm", "", "", ""), Level.NOTE),
        (Installation("/v/bin/vllm", "0.32.1", "", "/v/lib/python3.12/site-packages"), Level.ERROR),
        (Installation("", "", "vllm is not on PATH", ""), Level.ERROR),
    ],
)
def test_vllms_installation(found: Installation, level: Level) -> None:
    """It is there, its version is known, and its neighbour `supervisor` is whole."""
    assert levels(doctor_engine.installation(found)) == [level]


@pytest.mark.parametrize(
    ("given", "environ", "level"),
    [
        (VllmOptions(), {"VLLM_PORT": "8000", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "0"}, Level.OK),
        (VllmOptions(disable_log_stats=True), {}, Level.WARNING),
        (VllmOptions(), {"PROMETHEUS_MULTIPROC_DIR": "/tmp/x"}, Level.NOTE),
        (VllmOptions(), {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}, Level.WARNING),
        (VllmOptions(), {"VLLM_USE_RUST_FRONTEND": "1"}, Level.WARNING),
        (VllmOptions(), {"VLLM_PORT": "tcp://10.0.0.1:8000"}, Level.ERROR),
    ],
)
def test_what_blinds_us_is_said(given: VllmOptions, environ: dict[str, str], level: Level) -> None:
    """Each option and variable has its finding."""
    assert levels(doctor_engine.options("here", given, environ)) == [level]


def test_a_good_machine_has_nothing_to_mend() -> None:
    """Every check of it is well."""
    assert set(levels(doctor_machine.machine(MACHINE))) == {Level.OK}


def test_only_named_segments_are_to_be_removed() -> None:
    """No pattern that would hit another program's memory is advised: each file stands there, and a few at most."""
    unused = (*(f"/dev/shm/psm_{n}" for n in range(9)), "/dev/shm/psm_x y")
    for names in (unused[-2:], unused):
        [found] = doctor_machine.machine(replace(MACHINE, shm_unused=names, shm_untold=3))[1:2]
        assert (found.check, "*" in found.mend) == ("shm", False)
        assert "every Python program's is called psm_" in found.why
        assert "3 of which this user may not know" in found.what
        assert ("/dev/shm/psm_8" in found.mend, "(and 2 more)" in found.mend) == (len(names) == 2, len(names) == 10)
    assert "'/dev/shm/psm_x y'" in doctor_machine.machine(replace(MACHINE, shm_unused=unused[-1:]))[1].mend


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"shm_total": None}, "shm", Level.ERROR),
        ({"shm_total": 64 << 20, "shm_free": 64 << 20}, "shm", Level.WARNING),
        ({"shm_free": 0}, "shm", Level.WARNING),
        ({"shm_unused": ("/dev/shm/psm_1",)}, "shm", Level.NOTE),
        ({"shm_untold": 2}, "shm", Level.NOTE),
        ({"files_soft": 1024, "files_hard": 4096}, "files", Level.WARNING),
        ({"memory_available": GIB}, "memory", Level.WARNING),
        ({"memory_total": None}, "memory", Level.NOTE),
        ({"gpus": ()}, "gpu", Level.NOTE),
        ({"gpus": ("NVIDIA GB10",)}, "gpu", Level.NOTE),
        ({"year": 1970}, "clock", Level.ERROR),
        ({"clock_synchronised": False}, "clock", Level.NOTE),
        ({"cgroup_version": 1}, "cgroup", Level.NOTE),
        ({"delegated": "/x is not delegated to us"}, "cgroup", Level.NOTE),
        ({"problems": (("port", "0.0.0.0:80 is in use by pid 7 (nginx); stop it"),)}, "port", Level.ERROR),
        (
            {"problems": (("port", "0.0.0.0:80 is in use by pid 7 (vllm-supervisor serve); stop it"),)},
            "port",
            Level.NOTE,
        ),
    ],
)
def test_each_fact_of_a_machine_has_its_rule(change: dict[str, object], check: str, level: Level) -> None:
    """One fact changed gives one finding that is not well, of its own check."""
    bad = [found for found in doctor_machine.machine(replace(MACHINE, **change)) if found.level is not Level.OK]
    assert levels(bad) == [level]
    assert bad[0].check == check


@pytest.mark.parametrize(
    "change",
    [
        {"files_soft": 1024},  # a start raises its own
        {"files_soft": 1024, "files_hard": 4096, "units": True},  # the unit's own counts
        {"served": ("0.0.0.0:8000 is served by the supervisor '8000'",)},
    ],
)
def test_what_has_been_mended_is_well(change: dict[str, object]) -> None:
    """A limit that is raised where it counts, and an address that the instance itself holds, leave nothing to do."""
    assert {found.level for found in doctor_machine.machine(replace(MACHINE, **change))} == {Level.OK}


@pytest.mark.parametrize(
    ("limit", "level"), [("8447", Level.WARNING), ("8448", Level.OK), ("infinity", Level.OK), ("", Level.OK)]
)
def test_a_unit_s_own_limit_of_open_files_counts(limit: str, level: Level) -> None:
    """It is compared with what the configuration's connections need."""
    wanted = doctor_machine.files_wanted(4096)
    assert levels(doctor_units.unit(facts(LimitNOFILE=limit), 100.0, wanted)) == [level]


def test_a_unit_that_is_switched_off_is_no_rival_any_more() -> None:
    """After the advice was followed nothing is left to do, for a bare unit as for a watchdog's and its script."""
    bare = facts("/opt/vllm/bin/vllm serve tiny", UnitFileState="enabled")
    assert levels([doctor_units.bare(bare)]) == [Level.WARNING]
    assert "doctor --migrate x.service" in doctor_units.bare(bare).mend
    assert levels([doctor_units.bare(replace(bare, off=True))]) == [Level.OK]
    unit = "/etc/systemd/system/dog.service"
    sources = [
        Source(unit, "unit", "ExecStart=/bin/sh -c 'systemctl restart vllm'"),
        Source(f"{unit}.d/x.conf", "unit", "ExecStart=/bin/sh -c 'systemctl restart vllm'"),
        Source(f"/opt/dog.sh (named in {unit})", "script", "pkill vllm"),
        Source("/etc/cron.d/llm", "cron", "* * * * * root systemctl restart vllm"),
    ]
    assert doctor_rivals.suspects(sources, []) == ["dog.service"]
    assert len(doctor_rivals.rivals(sources, [])) == 4
    (left,) = doctor_rivals.rivals(sources, [], {"dog.service"})
    assert left.what.startswith("/etc/cron.d/llm")


def test_a_container_unit_is_a_bare_one() -> None:
    """`docker run` of vLLM's own image is vLLM without a supervisor."""
    assert facts("/usr/bin/docker run --rm vllm/vllm-openai:latest --model m").bare
