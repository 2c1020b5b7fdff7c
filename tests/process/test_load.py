"""Loads of every manner of speaking, with the mock engine behind a script that loads in that manner first."""

import sys
from pathlib import Path

import pytest

from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, Supervisor

QUIET = Path(__file__).parents[1] / "fakes" / "quiet_engine.py"


def start(account: Account, sign: str, load_s: float, start_timeout_s: float) -> tuple[Supervisor, int]:
    """Start a supervisor with such an engine; one failed start ends it."""
    port = free_port()
    keys = {
        "listen.port": port,
        "engine.start_timeout": start_timeout_s,
        "restart.start_attempts": 1,
        "restart.on_give_up": "exit",
    }
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    engine = (sys.executable, str(QUIET), sign, str(load_s), "serve", "tiny", "--uds", "{uds}")
    return account.start(*sets, "run", "--", *engine), port


@pytest.mark.parametrize("sign", ["plain", "rfc3339", "json", "warnings", "io", "memory"])
def test_a_load_that_goes_on_is_never_too_slow(sign: str, account: Account) -> None:
    """Twice as long as the limit, with lines of any format or none at all but reads or growing memory: it gets ready."""
    supervisor, port = start(account, sign, 8.0, 4.0)
    with Client(port) as client:
        supervisor.until(client.is_ready, within=60.0, what="ready")
    assert len(supervisor.events("spawned")) == 1


@pytest.mark.parametrize("sign", ["nothing", "heartbeat", "spin"])
def test_a_load_that_shows_nothing_new_ends(sign: str, account: Account) -> None:
    """Silence, one line over and over, and a spinning loop are ended, with what was looked for and a remedy that fits."""
    supervisor, _port = start(account, sign, 600.0, 3.0)
    assert supervisor.ends(within=60.0) == 69, supervisor.words()
    [said] = [line["sentence"] for line in supervisor.events("exited")]
    assert "no progress" in said
    assert "no new line, no I/O, no growing memory" in said
    assert "raise engine.start_timeout" in supervisor.err.text
    assert "OOM daemon" not in supervisor.err.text
