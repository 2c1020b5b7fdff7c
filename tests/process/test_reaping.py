"""The whole supervisor as parent of processes it never started, as PID 1 and elsewhere."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from fakes.ports import free_port
from fakes.supervisor_process import Account, Client

FERTILE = str(Path(__file__).parents[1] / "fakes" / "fertile_engine.py")
AS_PID_1 = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


@pytest.mark.parametrize("under", [AS_PID_1, ()], ids=["pid-1", "subreaper"])
def test_orphans_are_reaped_and_no_status_is_stolen(under: tuple[str, ...], account: Account) -> None:
    """Each engine leaves a hundred orphans and a hundred zombies; its own status 7 is read, and nothing is left of them."""
    port = free_port()
    quick = ("--set", "restart.backoff=20ms", "--set", "restart.max=1", "--set", f"listen.port={port}")
    engine = (sys.executable, FERTILE, "--uds", "{uds}", "--mock-fault", "exit=7@2req", "--mock-fault", "own_session")
    supervisor = account.start(*quick, "run", "--", *engine, under=under)
    with Client(port) as client:
        for life in (1, 2):
            supervisor.until(client.is_ready, within=30.0, what=f"engine {life} is ready")

            def over(ends: int = life) -> bool:
                client.chat()
                return len(supervisor.events("exited")) == ends

            supervisor.until(over, within=20.0, what="its end after some answers")
        supervisor.until(lambda: supervisor.events("parked"), within=10.0, what="parked")
        assert [end["raw"] for end in supervisor.events("exited")] == [7, 7]
        (ours,) = psutil.Process(supervisor.pid).children() if under else [psutil.Process(supervisor.pid)]
        supervisor.until(lambda: not ours.children(recursive=True), within=5.0, what="no child, zombies included")
        assert len(account.leftovers()) == (2 if under else 1), "the supervisor alone, and what put it under"
        os.kill(ours.pid, signal.SIGINT)
        assert supervisor.ends(within=10.0) == (130 if under else -signal.SIGINT), supervisor.words()
