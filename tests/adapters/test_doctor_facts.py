"""What the pre-flight gathers: units from systemctl's words, rivals from files, vLLM from its environment, this machine."""

import json
import os
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from vllm_supervisor.adapters import machine_facts, vllm_install
from vllm_supervisor.adapters.rival_sources import gather
from vllm_supervisor.adapters.systemd_units import services, switched_off

PRINTED = """\
Type=notify
KillMode=mixed
TimeoutStopUSec=2min
ExecStart={{ path=/x/vllm-supervisor ; argv[]=/x/vllm-supervisor serve $SERVE ; ignore_errors=no ; pid=0 }}
EnvironmentFiles=/none/at/all (ignore_errors=yes)
EnvironmentFiles={file} (ignore_errors=no)
EnvironmentFiles=/none/either (ignore_errors=yes)
Environment=A=1 B=2
Id=vllm-supervisor@8000.service

Type=exec
ExecStart={{ path=/usr/sbin/sshd ; argv[]=/usr/sbin/sshd -D ; ignore_errors=no ; pid=0 }}
Id=ssh.service
"""
INSTALLED = (
    "Id=old-vllm.service\nTimeoutStopUSec=infinity\nExecStart={ path=/x ; argv[]=/x/vllm serve y ; ignore_errors=no }\n"
)


def test_services_that_run_a_supervisor_or_vllm_are_found(tmp_path: Path) -> None:
    """Loaded ones and installed ones, with their environment files read; others are left out."""
    file = tmp_path / "8000.env"
    file.write_text("SERVE=tiny --port 8000\n")
    asked: list[Sequence[str]] = []

    def ask(words: Sequence[str]) -> str:
        asked.append(words)
        if "list-unit-files" in words:
            return "vllm-supervisor@.service disabled\nold-vllm.service enabled\n"
        return PRINTED.format(file=file) if words[-1] == "*.service" else INSTALLED

    found = services(ask, user=True, also=["other.service"])
    assert found is not None
    ours, bare = found
    assert (ours.name, ours.ours, ours.stop_s) == ("vllm-supervisor@8000.service", True, 120.0)
    assert ours.serve_arguments() == ["tiny", "--port", "8000"]
    assert ours.environ == {"A": "1", "B": "2", "SERVE": "tiny --port 8000"}
    assert (bare.name, bare.bare, bare.stop_s) == ("old-vllm.service", True, None)
    assert all(words[0] == "--user" for words in asked)
    assert asked[-2][-2:] == ["old-vllm.service", "other.service"]
    assert asked[-1][-2:] == ["vllm-supervisor@8000.service", "old-vllm.service"]


SWITCHES = {
    "on.service": "ActiveState=active\nUnitFileState=enabled",
    "old.service": "ActiveState=inactive\nUnitFileState=disabled",
    "failed.service": "ActiveState=failed\nUnitFileState=static",
    "boots.service": "ActiveState=inactive\nUnitFileState=enabled",
    "masked.service": "ActiveState=inactive\nUnitFileState=masked\nTriggeredBy=on.timer",
    "timed.service": "ActiveState=inactive\nUnitFileState=static\nTriggeredBy=on.timer",
    "untimed.service": "ActiveState=inactive\nUnitFileState=disabled\nTriggeredBy=off.timer",
    "rescue.service": "ActiveState=inactive\nUnitFileState=static\nOnFailureOf=on.service old.service",
    "unknown.service": "ActiveState=inactive\nUnitFileState=",
    "on.timer": "ActiveState=active\nUnitFileState=enabled",
    "off.timer": "ActiveState=inactive\nUnitFileState=disabled",
}


def test_units_that_nothing_starts_are_switched_off() -> None:
    """Disabled, masked or static, at rest, and started by no timer and no other unit that is in use itself."""

    def ask(words: Sequence[str]) -> str:
        return "\n\n".join(f"Id={name}\n{SWITCHES[name]}" for name in words[words.index("--") + 1 :])

    services_of = [name for name in SWITCHES if name.endswith(".service")]
    found = switched_off(ask, services_of, user=False)
    assert found == {"old.service", "failed.service", "masked.service", "untimed.service"}
    assert switched_off(ask, [], user=False) == set()

    def silent(_words: Sequence[str]) -> str:
        raise subprocess.CalledProcessError(1, "systemctl")

    assert switched_off(silent, services_of, user=False) == set()


def test_a_manager_that_does_not_answer_is_told_from_one_without_units() -> None:
    """None is not an empty list."""

    def silent(_words: Sequence[str]) -> str:
        raise subprocess.CalledProcessError(1, "systemctl")

    assert services(silent, user=False) is None
    assert services(lambda _words: "", user=False) == []


def test_rival_texts_are_read_with_the_scripts_they_name(tmp_path: Path) -> None:
    """Cron files, units, watchdogs' files and containers below a root, and scripts one level deep."""
    files = {
        "etc/cron.d/llm": "* * * * * root /opt/llm/watch.sh --port 8000\n",
        "opt/llm/watch.sh": "#!/bin/sh\ncurl localhost:8000\n",
        "opt/llm/data": "no script",
        "etc/systemd/system/watch.service": "[Service]\nExecStart=/opt/llm/watch.sh /opt/llm/data /usr/bin/env\n",
        "etc/systemd/system/x.service.d/a.conf": "[Service]\n",
        "etc/supervisor/conf.d/llm.conf": "[program:llm]\n",
        "etc/passwd": "root",
        "var/lib/docker/containers/abc/hostconfig.json": json.dumps({"RestartPolicy": {"Name": "always"}}),
        "var/lib/docker/containers/abc/config.v2.json": json.dumps(
            {"Name": "/llm", "Path": "vllm", "Args": ["serve", "x"], "Config": {"Image": "vllm/vllm-openai"}}
        ),
        "var/lib/docker/containers/bad/hostconfig.json": "{",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = gather(tmp_path)
    assert sorted((one.kind, one.where) for one in found.texts) == [
        ("cron", "/etc/cron.d/llm"),
        ("script", "/opt/llm/watch.sh (named in /etc/cron.d/llm)"),
        ("script", "/opt/llm/watch.sh (named in /etc/systemd/system/watch.service)"),
        ("unit", "/etc/systemd/system/watch.service"),
        ("unit", "/etc/systemd/system/x.service.d/a.conf"),
        ("watchdog", "/etc/supervisor/conf.d/llm.conf"),
    ]
    assert [(one.name, one.restart, one.command) for one in found.containers] == [
        ("llm", "always", "vllm/vllm-openai vllm serve x")
    ]
    assert found.hidden == 0


@pytest.mark.parametrize("whole", [True, False])
def test_vllms_environment_is_read_without_running_it(tmp_path: Path, whole: bool) -> None:
    """The version comes from its metadata, also through a link; a `supervisor` without its main module is broken."""
    site = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    for name in ("vllm-0.32.0+cpu.dist-info", "supervisor-4.3.0.dist-info", "supervisor"):
        (site / name).mkdir(parents=True)
    if whole:
        (site / "supervisor" / "supervisord.py").touch()
    program = tmp_path / "venv" / "bin" / "vllm"
    program.parent.mkdir()
    program.touch()
    link = tmp_path / "vllm"
    link.symlink_to(program)
    for command in (program, link):
        assert vllm_install.version(command) == "0.32.0+cpu"
        assert vllm_install.clobbered_supervisor(command) == ("" if whole else str(site))
    assert vllm_install.version(tmp_path / "nowhere" / "vllm") == ""


def test_this_machine_is_read() -> None:
    """Limits, memory and shared memory agree with what other tools say of this machine."""
    assert machine_facts.open_files()[0] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    memory = machine_facts.memory()
    assert memory is not None
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.available <= memory.total
    shm = machine_facts.shared_memory()
    assert (shm is not None) == os.path.isdir("/dev/shm")  # noqa: PTH112 - it is one word
    assert machine_facts.clock_synchronised() in {True, False}


def test_gpus_are_named_by_the_driver(tmp_path: Path) -> None:
    """The model as NVIDIA's driver prints it; without a driver there is none."""
    assert machine_facts.gpus(tmp_path) == ()
    assert machine_facts.driver(tmp_path) == ""
    information = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA GB10\nIRQ:   \t\t 1\n")
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Kernel Module  580.95.05  Release\n"
    )
    assert machine_facts.gpus(tmp_path) == ("NVIDIA GB10",)
    assert machine_facts.driver(tmp_path) == "580.95.05"
