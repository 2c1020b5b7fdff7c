"""`check --state FILE`: whatever the file is, the check is made, or one line says why not."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.adapters.run_fate import boot_id
from vllm_supervisor.cli.check import check
from vllm_supervisor.core.check import readings, recall, remember
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.health import Memory
from vllm_supervisor.core.progress import Track
from vllm_supervisor.core.samples import EngineSeries

NOBODY = "unix:/nonexistent/engine.sock"
MEMORY = Memory(
    tracks={"0": Track(progress_at=5.0, demand_at=3.0, series=EngineSeries("0", running=1.0, asleep=False))},
    whole=Track(progress_at=5.0),
    starts=(7.0,),
    tokens=(1.0, 2.0),
)


def run(state: Path) -> tuple[str, str]:
    """Check an address where nobody listens; return the two outputs. Raises what the command raises."""
    told = CliRunner().invoke(check, [NOBODY, "--no-probe", "--state", str(state)], standalone_mode=False)
    if isinstance(told.exception, UsageError):
        raise told.exception
    assert told.exception is None, told.exception
    return told.stdout, told.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not JSON"),
        (bytes(1000), "NUL bytes in it"),
        (b"[" * 100_000, "nested too deep"),
        (b"1" * 5000, "a number has too many digits"),
        (b"\xff", "not UTF-8"),
        (b"x" * 5_000_000, "larger than 4 MiB"),
        (b"[]", "it holds no readings"),
        (b'{"boot": 1, "servers": []}', "it holds no readings"),
    ],
)
def test_a_file_that_holds_no_readings_is_told_and_written_anew(tmp_path: Path, content: bytes, told: str) -> None:
    """On one line of standard error; the result stands on standard output alone, as a monitoring system takes it."""
    state = tmp_path / "state"
    state.write_bytes(content)
    said, problem = run(state)
    assert problem == f"vllm-supervisor: --state {state} is unreadable: {told}; it is written anew\n"
    assert "nobody listens at this address" in said
    assert NOBODY in json.loads(state.read_bytes())["servers"]
    assert run(state)[1] == ""


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Path.mkdir, "it is no regular file"),
        (os.mkfifo, "it is no regular file"),
        (lambda path: path.symlink_to("elsewhere"), "it is a symbolic link"),
    ],
)
def test_what_is_no_file_is_neither_read_nor_replaced(
    tmp_path: Path, make: Callable[[Path], object], told: str
) -> None:
    """The mistake is named before anything is asked, and what is there stays."""
    state = tmp_path / "state"
    make(state)
    mode = state.lstat().st_mode
    with pytest.raises(UsageError, match=f"--state {state} cannot be read: {told}; give a file of your own"):
        run(state)
    assert state.lstat().st_mode == mode


@pytest.mark.parametrize("server", [None, 7, [], {}, {"tracks": "x"}, {"tracks": {}, "whole": [], "starts": 1}])
def test_a_server_whose_reading_cannot_be_read_is_read_anew(tmp_path: Path, server: Any) -> None:
    """As if it had never been checked."""
    state = tmp_path / "state"
    state.write_text(json.dumps({"boot": boot_id(), "servers": {NOBODY: server}}), encoding="utf-8")
    assert "nobody listens at this address" in run(state)[0]


def test_what_is_remembered_is_recalled() -> None:
    """Through JSON and back it is the same."""
    assert recall(json.loads(json.dumps(remember(MEMORY)))) == MEMORY


def test_a_reading_of_another_boot_is_none() -> None:
    """Its times mean nothing now."""
    kept = {"boot": "a", "servers": {"u": 1}}
    assert (readings(kept, "a"), readings(kept, "b")) == ({"u": 1}, {})


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})


@given(st.dictionaries(st.sampled_from(["progress_at", "demand_at", "series", "in_decode", "kv_max", "odd"]), values))
def test_a_track_of_wrong_types_is_no_memory(changes: dict[str, Any]) -> None:
    """Whatever one field holds, what is recalled has numbers where numbers are counted with, or is nothing."""
    plain = json.loads(json.dumps(remember(MEMORY)))
    plain["tracks"]["0"] |= changes
    found = recall(plain)
    if found is not None:
        track = found.tracks["0"]
        assert all(type(value) is float for value in (track.progress_at, track.kv_max, track.age(9.0)))
        assert track.demand_at is None or type(track.demand_at) is float
        assert track.series is None or isinstance(track.series, EngineSeries)
