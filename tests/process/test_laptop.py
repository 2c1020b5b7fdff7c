"""configs/laptop.toml does what it promises."""

import tomllib
from pathlib import Path

from fakes.judged import Judged, asking
from fakes.supervisor_process import Account, StartMock
from vllm_supervisor.core.config import build

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.toml"


def test_a_hang_is_seen_within_half_a_minute(start_mock: StartMock, account: Account) -> None:
    """The file's longest waits end before that, and an engine that stops stepping under a request is restarted for it."""
    health = build(tomllib.loads(LAPTOP.read_text()), {}, ()).config.health
    assert sum(health.waits_slow) + 2 * health.interval < 30
    supervisor, client = start_mock(before=("--config", str(LAPTOP), "--set", "log.format=json"))
    supervisor.until(client.is_ready, within=30.0, what="ready")
    judged = Judged(account, supervisor, client).ready()
    judged.fault("hang_steps")
    with asking(client):
        supervisor.until(lambda: supervisor.events("exited"), within=90.0, what="the end of the hang")
    (ended,) = supervisor.events("exited")
    assert ended["cause"] == "hang"
    judged.ready(2)
    judged.close()
