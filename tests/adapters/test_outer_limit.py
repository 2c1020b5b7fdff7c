"""The outer limit: our unit from /proc/self/cgroup, its TimeoutStopSec from what systemctl prints."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_supervisor.adapters.outer_limit import OuterLimit, Unit, read, span, unit_of


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/vllm.service\n", Unit("vllm.service", user=False)),
        ("0::/system.slice/vllm.service/engine\n", Unit("vllm.service", user=False)),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/vllm-supervisor@8000.service\n",
            Unit("vllm-supervisor@8000.service", user=True),
        ),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-terminal.scope\n", None),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
        ("0::/\n", None),
        ("12:cpu:/x\n1:name=systemd:/system.slice/vllm.service\n", Unit("vllm.service", user=False)),
        ("9:name=systemd:/\n0::/system.slice/vllm.service/supervisor\n", Unit("vllm.service", user=False)),
        ("", None),
    ],
)
def test_the_unit_is_read_from_the_cgroup(cgroup: str, unit: Unit | None) -> None:
    """System units, user units, delegated sub-groups and places outside any service are told apart."""
    assert unit_of(cgroup) == unit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1min 30s", 90.0), ("infinity", None), ("500ms", 0.5), ("1h 2min 3s", 3723.0), ("2d", 172800.0), ("1.5s", 1.5)],
)
def test_spans_are_read(text: str, seconds: float | None) -> None:
    """What systemctl prints for a time span becomes seconds, infinity becomes None."""
    assert span(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 apples", "0"])
def test_what_is_no_span_is_refused(text: str) -> None:
    """Anything else raises instead of becoming a number."""
    with pytest.raises(ValueError, match="no time span"):
        span(text)


def answer(text: str, asked: list[Sequence[str]] | None = None) -> OuterLimit | None:
    """Read the limit of a unit whose main process is 7, being a child of 7."""

    def run(arguments: Sequence[str]) -> str:
        if asked is not None:
            asked.append(arguments)
        return text

    return read("0::/user.slice/user@5.service/vllm.service\n", run, lambda _pid: {7, 8})


def test_our_own_unit_s_limit_is_found() -> None:
    """The limit of the unit whose main process is ours is returned with its owner's name, asked of the right manager."""
    asked: list[Sequence[str]] = []
    assert answer("TimeoutStopUSec=1min 30s\nMainPID=7\n", asked) == OuterLimit(90.0, "TimeoutStopSec of vllm.service")
    assert asked[0][:2] == ["--user", "show"]


def test_infinity_is_a_limit_without_seconds() -> None:
    """A unit that waits for ever is known as such, not as unknown."""
    found = answer("TimeoutStopUSec=infinity\nMainPID=7\n")
    assert found is not None
    assert found.seconds is None


@pytest.mark.parametrize(
    "text", ["TimeoutStopUSec=90s\nMainPID=99\n", "MainPID=7\n", "", "TimeoutStopUSec=x\nMainPID=7"]
)
def test_another_unit_s_limit_is_not_ours(text: str) -> None:
    """A unit whose main process is not ours, or an answer without the limit, tells nothing."""
    assert answer(text) is None


@pytest.mark.parametrize("error", [FileNotFoundError("systemctl"), subprocess.TimeoutExpired("systemctl", 2.0)])
def test_no_systemctl_is_no_answer(error: Exception) -> None:
    """A missing or hanging systemctl means that no limit is known."""

    def run(_arguments: Sequence[str]) -> str:
        raise error

    assert read("0::/system.slice/vllm.service\n", run, lambda _pid: {7}) is None


def refused(_arguments: Sequence[str]) -> str:
    """Be a systemctl that the bus does not let in."""
    raise subprocess.CalledProcessError(1, "systemctl")


def installed(root: Path) -> Path:
    """Install a template with 120 s below `root`, and a drop-in of one instance that says 50 s."""
    units = root / "etc/systemd/system"
    (units / "vllm@8000.service.d").mkdir(parents=True)
    (units / "vllm@.service").write_text("[Service]\nTimeoutStopSec=120s\n")
    (units / "vllm@8000.service.d/override.conf").write_text("[Service]\nTimeoutStopSec=50s\n")
    return root


@pytest.mark.parametrize(("instance", "seconds"), [("8000", 50.0), ("8001", 120.0)])
def test_where_the_bus_refuses_us_the_unit_s_files_are_read(tmp_path: Path, instance: str, seconds: float) -> None:
    """As a dynamic user: the limit is the files', and the owner's name says so."""
    cgroup = f"0::/system.slice/system-vllm.slice/vllm@{instance}.service/supervisor\n"
    found = read(cgroup, refused, lambda _pid: {7, 8}, exec_pid="7", root=installed(tmp_path))
    assert found == OuterLimit(seconds, f"TimeoutStopSec in the files of vllm@{instance}.service")


@pytest.mark.parametrize(
    ("unit", "exec_pid"), [("vllm@8000.service", "9"), ("vllm@8000.service", ""), ("other.service", "7")]
)
def test_files_of_a_unit_that_is_not_proven_ours_tell_nothing(tmp_path: Path, unit: str, exec_pid: str) -> None:
    """Another main process, none known, or no files: no limit is known."""
    assert read(f"0::/{unit}\n", refused, lambda _pid: {7}, exec_pid=exec_pid, root=installed(tmp_path)) is None
