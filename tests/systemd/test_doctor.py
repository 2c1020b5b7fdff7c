"""`doctor` beside a real systemd: what it says of the shipped unit and of one that fights or is too short."""

import json

import pytest

from fakes.ports import free_port
from fakes.rig import Rig, Unit

pytestmark = pytest.mark.systemd


def findings(unit: Unit) -> list[dict[str, str]]:
    """Give what doctor says of units and rivals, the good news left out."""
    done = unit.tool("doctor", "--json")
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return [one for one in found if one["check"] in {"unit", "rival", "options", "vllm"} and one["level"] != "ok"]


def test_the_shipped_unit_has_nothing_to_mend(rig: Rig) -> None:
    """Of unit, options and rivals there is no warning and no note but that the stand-in has no version."""
    with Unit(rig, free_port()) as unit:
        assert [one["what"] for one in findings(unit) if one["level"] != "note"] == []
        assert ["version" in one["what"] for one in findings(unit)] == [True], findings(unit)


def test_a_unit_that_would_lose_requests_is_named_with_the_mend(rig: Rig) -> None:
    """KillMode, a stop limit shorter than its own configuration needs, OOMPolicy, Type, Restart and a rival, each once."""
    bad = {
        "KillMode": "control-group", "TimeoutStopSec": "60s", "OOMPolicy": "stop", "Type": "exec", "WatchdogSec": "0",
        "Restart": "always", "Delegate": "no",
    }  # fmt: skip
    port = free_port()
    cron = "/etc/cron.d/llm"
    rig.write(cron, f"* * * * * root curl -fs localhost:{port}/health || systemctl restart vllm-supervisor@{port}\n")
    with Unit(rig, port, "--disable-log-stats", ("VLLM_SUPERVISOR_DRAIN__BUDGET=40s",), **bad) as unit:
        unit.start()
        said = [f"{one['level']} {one['what']} {one['mend']}" for one in findings(unit) if "version" not in one["what"]]
    rig.path(cron).unlink()
    wanted = {
        "error": ["KillMode=control-group"],
        "warning": [
            "60 s, and a stop takes up to 80 s",
            "Type=exec",
            "OOMPolicy=stop",
            "Restart=always",
            cron,
            "--disable-log-stats",
        ],
        "note": ["no WatchdogSec", "no Delegate"],
    }
    for level, words in wanted.items():
        for word in words:
            assert [line for line in said if line.startswith(level) and word in line], (level, word, said)
    assert len(said) == sum(map(len, wanted.values())), said
