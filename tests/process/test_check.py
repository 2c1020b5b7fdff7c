"""`check` against the stand-in as a bare server: what a person reads, and the exit status a monitoring system takes."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from fakes.mock_process import MockEngine
from vllm_supervisor.cli.check import check

WAITS = ("--wait", "300ms", "--wait", "300ms")
ENDLESS = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockEngine]:
    """Give the bare server that most tests share."""
    with MockEngine("--max-model-len", "1m", directory=tmp_path_factory.mktemp("e")) as engine:
        engine.wait_ready()
        yield engine


def run(engine: MockEngine, *options: str) -> tuple[int, str]:
    """Check it; give exit status and sentence."""
    told = CliRunner().invoke(check, [f"unix:{engine.uds}", *options])
    assert told.exception is None or isinstance(told.exception, SystemExit), told.exception
    return told.exit_code, told.output


def test_idle(engine: MockEngine) -> None:
    """Nothing runs: one token is asked for, and the sentence says how long it took."""
    code, said = run(engine)
    assert code == 0
    assert said.startswith(f"OK - unix:{engine.uds}: idle: a one-token request was answered in ")
    assert run(engine, "--no-probe") == (0, f"OK - unix:{engine.uds}: idle: nothing runs and nothing waits\n")


def test_busy_and_stopped(engine: MockEngine) -> None:
    """With a stream open: busy with its rates. With its worker stopped: suspect, and stuck when waits are given."""
    with engine.stream("/v1/completions", ENDLESS) as stream:
        next(iter(stream))
        code, said = run(engine)
        assert (code, "busy and healthy: 1 running, 0 waiting, " in said) == (0, True), said
        children = psutil.Process(engine.process.pid).children(recursive=True)
        [worker] = [one for one in children if one.name().startswith("VLLM::Worker")]
        worker.send_signal(signal.SIGSTOP)
        try:
            code, said = run(engine)
            assert (code, "give --wait S --wait S to be sure" in said) == (1, True), said
            code, said = run(engine, *WAITS, "--json")
            found = json.loads(said)
            assert (code, found["exit"], found["servers"][0]["verdict"]) == (2, 2, "stuck")
            assert found["servers"][0]["sentence"].startswith("the engine has had work for")
        finally:
            worker.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("fault", "code", "part"),
    [
        ("metrics_absent", 3, "/metrics has status 404: neither idle nor hung can be told from that"),
        ("metrics_python_only", 3, "no series of an engine"),
        ("start_time_alternates", 3, "a proxy stands in between; check the backends directly"),
        ("asleep", 1, "the engine was put to sleep"),
        ("hang_first_step", 2, "it looks idle, but a one-token request had no answer for"),
        ("health_status", 2, "the engine is dead"),
    ],
)
def test_faults(engine: MockEngine, fault: str, code: int, part: str) -> None:
    """What cannot be judged is said to be so, and what looks idle and does not answer is found."""
    engine.fault(fault)
    try:
        found, said = run(engine, *WAITS)
        assert (found, part in said) == (code, True), said
    finally:
        engine.clear(fault)


def test_a_state_file_finds_a_hang_over_several_runs(engine: MockEngine, tmp_path: Path) -> None:
    """Remembered readings take the place of waiting: the run after the waits says stuck, and did not wait itself."""
    state = tmp_path / "state"
    try:
        with engine.stream("/v1/completions", ENDLESS):
            engine.fault("hang_steps")
            codes = [run(engine, *WAITS, "--no-probe", "--state", str(state))[0] for _ in range(2)]
            while codes[-1] != 2:
                codes.append(run(engine, *WAITS, "--no-probe", "--state", str(state))[0])
                assert len(codes) < 100
    finally:
        engine.clear("hang_steps")
    assert set(codes) <= {0, 1, 2}
    assert state.stat().st_mode & 0o777 == 0o600


def test_killed_and_restarted_between_the_reads(tmp_path: Path) -> None:
    """A server that is gone is unreachable; one that came back between the reads is said to be another life."""
    with MockEngine(directory=tmp_path) as first:
        first.wait_ready()
        place = first.uds
        assert run(first, "--state", str(tmp_path / "state"))[0] == 0
    Path(place).unlink()
    code, said = run(first)
    assert (code, "nobody listens at this address" in said) == (2, True), said
    with MockEngine(directory=tmp_path) as second:
        second.wait_ready()
        Path(second.uds).rename(place)
        code, said = run(first, "--state", str(tmp_path / "state"))
        assert (code, "restarted between two reads; idle" in said) == (0, True), said
        both = CliRunner().invoke(check, [f"unix:{place}", f"unix:{tmp_path}/nobody", "--no-probe"])
        assert (both.exit_code, both.output.count("\n")) == (2, 2)
        assert run(first, "--proxy") == (
            0,
            f"OK - unix:{place}: the proxy answers and lists 1 model(s); the engines behind it are not judged\n",
        )
