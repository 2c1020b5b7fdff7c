"""What is read of the engine's processes, on real ones."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vllm_supervisor.adapters.engine_processes import process_sample

# A child that takes a name of vLLM's, burns a little CPU, says so, and waits to be told to end.
CHILD = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
while time.process_time() < 0.05: pass
print("ready", flush=True)
sys.stdin.read()
"""


def start(name: str) -> subprocess.Popen[bytes]:
    """Start a process whose title is `name`."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


@pytest.fixture
def family() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start an API server, an EngineCore, a worker and a compiler, as far as names go."""
    children = [start(name) for name in ("vllm", "VLLM::EngineCore", "VLLM::Worker_TP0", "ptxas")]
    yield children
    for child in children:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        child.stdout.close()
        child.wait()


def test_cpu_is_told_apart_by_role(family: list[subprocess.Popen[bytes]]) -> None:
    """API server, EngineCore and workers have CPU seconds of their own, and compilers are counted."""
    pids = [child.pid for child in family]
    sample = process_sample(pids[0], pids)
    assert sample.alive
    for cpu in (sample.api_cpu, sample.core_cpu, sample.worker_cpu):
        assert cpu is not None
        assert cpu >= 0.03
    assert sample.compilers == 1


def test_an_engine_lives_as_long_as_its_main_process(family: list[subprocess.Popen[bytes]]) -> None:
    """With the main process gone, or a zombie, the engine is not alive, whoever else still is."""
    main, *others = family
    assert main.stdin is not None
    main.stdin.close()
    os.waitid(os.P_PID, main.pid, os.WEXITED | os.WNOWAIT)
    sample = process_sample(main.pid, [child.pid for child in others])
    assert not sample.alive
    assert sample.core_cpu is not None
    assert sample.api_cpu is None
