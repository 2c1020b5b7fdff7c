"""Keys that contradict each other, and values that are meant to hurt."""

from typing import Any

import pytest

from vllm_supervisor.core.config import build, settings
from vllm_supervisor.core.config_pairs import PAIRS
from vllm_supervisor.core.errors import ConfigError

# Of each row: values that contradict, and such of the same keys that just fit.
ROWS: list[tuple[dict[str, str], dict[str, str]]] = [
    ({"memory.floor": "10%"}, {"memory.floor": "9%"}),
    ({"memory.low": "5%"}, {"memory.low": "6%"}),
    ({"restart.backoff": "2m", "restart.backoff_max": "1m"}, {"restart.backoff": "2m"}),
    ({"restart.backoff_max": "2m", "restart.within": "1m"}, {"restart.within": "1m"}),
    ({"health.waits": "4h,4h"}, {"health.waits": "2h,3h"}),
    ({"restart.stuck_within": "1m"}, {"restart.stuck_within": "6m"}),
    ({"health.waits": "5m,5m", "health.waits_slow": "4m,6m"}, {"health.waits": "5m,5m", "health.waits_slow": "5m,5m"}),
    ({"health.interval": "1m", "health.waits": "30s,30s"}, {"health.interval": "1h"}),
    (
        {"health.interval": "1m", "health.failing_after": "30s"},
        {"health.interval": "30s", "health.failing_after": "30s"},
    ),
    ({"health.probe_interval": "1s", "health.interval": "2s"}, {"health.probe_interval": "0", "health.interval": "2s"}),
    (
        {"front_door.max_in_flight": "101", "front_door.max_connections": "100"},
        {"front_door.max_connections": "100"},
    ),
    (
        {"front_door.hold": "11s", "front_door.request_deadline": "10s"},
        {"front_door.hold": "10s", "front_door.request_deadline": "10s"},
    ),
    ({"ledger.segment": "3GiB", "ledger.max_size": "2GiB"}, {"ledger.segment": "3GiB"}),
    ({"ledger.segment": "2MiB", "ledger.max_size": "1MiB"}, {"ledger.max_size": "1MiB"}),
    ({"restart.on_give_up": "exit", "restart.slow_retry": "1m"}, {"restart.slow_retry": "1m"}),
]


def words(values: dict[str, str]) -> list[str]:
    """Write values as `--set` does."""
    return [f"{key}={value}" for key, value in values.items()]


@pytest.mark.parametrize(("bad", "good"), ROWS)
def test_a_contradiction_is_refused(bad: dict[str, str], good: dict[str, str]) -> None:
    """The line names both keys, both values and what to change; values that just fit are taken."""
    with pytest.raises(ConfigError) as caught:
        build(None, {}, words(bad))
    [line] = caught.value.problems
    assert line.startswith("--set: ")
    assert all(key in line for key in bad)
    assert line.count(" = ") >= 2
    build(None, {}, words(good))


def test_every_pair_is_tried() -> None:
    """Each row of the table names keys there are, and one of the tests above is about it."""
    known = settings()
    tried = set[tuple[str, str]]()
    for bad, _ in ROWS:
        with pytest.raises(ConfigError) as caught:
            build(None, {}, words(bad))
        tried |= {
            (pair.first, pair.second)
            for pair in PAIRS
            if pair.first in str(caught.value) and pair.remedy in str(caught.value)
        }
    assert tried == {(pair.first, pair.second) for pair in PAIRS}
    assert {key for pair in PAIRS for key in (pair.first, pair.second)} <= known.keys()


@pytest.mark.parametrize(
    "file",
    [
        {"drain": {"budget": int("f" * 5_000, 16)}},
        {"drain": {"budget": -int("f" * 5_000, 16)}},
        {"drain": {"budget": float("nan")}},
        {"drain": {"budget": float("inf")}},
        {"ledger": {"segment": int("f" * 5_000, 16)}},
        {"listen": {"port": int("f" * 5_000, 16)}},
        {"x" * 1_000_000: 1},
        {"drain": {"x" * 1_000_000: 1}},
        {"x" * 1_000_000: {"a": 1}},
        {f"unknown_{number}": 1 for number in range(20_000)},
        {"release": "x\x00"},
        {"release": "\udcff"},
        {"engine": {"env": {"A": "\udcff"}}},
        {"engine": {"env": {"A=B": "c"}}},
    ],
    ids=[f"file {number}" for number in range(14)],
)
def test_hostile_values_of_a_file(file: dict[str, Any]) -> None:
    """Each is told in short lines, quickly, whatever its size."""
    with pytest.raises(ConfigError) as caught:
        build(file, {}, [])
    assert len(caught.value.problems) <= 51
    assert all(len(line) < 400 for line in caught.value.problems)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("signals.forward", "[" * 20_000),
        ("signals.forward", "[" + "9" * 5_000 + "]"),
        ("signals.forward", "a," * 50_000),
        ("drain.budget", "9" * 5_000),
        ("drain.budget", "\udcff"),
        ("ledger.segment", "9" * 5_000 + "GiB"),
        ("listen.port", "9" * 5_000),
        ("memory.low", "9" * 5_000 + "%"),
        ("release", "\udcff"),
        ("release", "\x1b[2J"),
        ("engine.env.A", "\udcff"),
        ("x" * 1_000_000, "1"),
    ],
    ids=lambda text: text[:20].encode("ascii", "backslashreplace").decode(),
)
def test_hostile_texts(key: str, value: str) -> None:
    """A text of the environment or of `--set` is told in one short line, the same by both ways."""
    name = "VLLM_SUPERVISOR_" + key.upper().replace(".", "__", 1).replace(".", "__")
    with pytest.raises(ConfigError) as by_set:
        build(None, {}, [f"{key}={value}"])
    assert [len(line) < 400 for line in by_set.value.problems] == [True]
    if "." in key:
        with pytest.raises(ConfigError) as by_env:
            build(None, {name: value}, [])
        assert [len(line) < 400 for line in by_env.value.problems] == [True]
