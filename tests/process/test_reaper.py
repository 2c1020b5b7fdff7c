"""Orphans and zombies are reaped, and no status is stolen: as PID 1 and as subreaper."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_supervisor.adapters.reaper import _children, _children_by_parent

FAKE = Path(__file__).parents[1] / "fakes" / "reaping.py"
AS_PID_1 = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@pytest.mark.parametrize("wrapper", [AS_PID_1, []], ids=["pid-1", "subreaper"])
def test_a_hundred_orphans_and_a_hundred_zombies(wrapper: list[str]) -> None:
    """All of them are reaped by pid while the statuses of 51 owned children arrive unharmed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [*wrapper, sys.executable, str(FAKE)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    told = json.loads(ran.stdout)
    assert told["statuses"] == {"engine": 42, **{str(code): code for code in range(50)}}
    # 20 of each status 0..4 from the zombies, 100 of 3 from the orphans, 0 from the 101 parents between.
    assert told["reaped"] == {"0": 20 + 101, "1": 20, "2": 20, "3": 120, "4": 20}
    assert told["left"] == []
    assert (told["pid"] == 1) == bool(wrapper)


def test_children_are_found_without_the_kernels_list() -> None:
    """Where the kernel has no list of children, the parent column gives the same."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
        assert child.pid in _children_by_parent()
        assert child.pid in _children()
        child.communicate(b"")
