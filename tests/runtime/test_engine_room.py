"""The engine room when the world refuses: what cannot be made is a failed start, never a fault of ours."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_supervisor.adapters.cgroup import Unavailable
from vllm_supervisor.core import facts
from vllm_supervisor.core.engine_command import EngineKind, Transport
from vllm_supervisor.runtime import engine_room
from vllm_supervisor.runtime.engine_room import EngineRoom


@pytest.mark.parametrize("refused", ["engine-", "steps"])
def test_a_full_run_directory_is_a_failed_start_that_may_pass(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever directory of an incarnation cannot be made for want of room, the start fails and is tried again."""
    plan: Any = SimpleNamespace(
        kind=EngineKind.VLLM,
        config=SimpleNamespace(engine=SimpleNamespace(beacon="auto", sweep_domain="")),
        command=SimpleNamespace(transport=Transport.UDS),
    )
    make = Path.mkdir

    def full(path: Path, *args: Any, **more: Any) -> None:
        if path.name.startswith(refused):
            raise OSError(errno.ENOSPC, "No space left on device")
        make(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", full)
    monkeypatch.setattr(engine_room, "LONGEST_HOME", 4096)  # the directory of this test is a long one
    told: list[facts.Fact] = []
    none: Any = None
    room = EngineRoom(
        plan,
        nursery=none,
        instance="i",
        run="r",
        run_dir=lambda: tmp_path,
        subreaper=False,
        cgroup=Unavailable("none"),
        tell=told.append,
        forward=none,
        requests_lost=lambda _since: 0,
        memory=none,
        log=none,
    )
    room.spawn(1)
    assert told == [
        facts.SpawnFailed(f"{tmp_path} cannot hold the engine's sockets: No space left on device", may_pass=True)
    ]
