"""configs/laptop.toml does what it promises."""

from pathlib import Path

from fakes.judged import Judged, asking
from fakes.supervisor_process import Account, StartMock

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.toml"


def test_a_hang_is_seen_within_half_a_minute(start_mock: StartMock, account: Account) -> None:
    """An engine that stops stepping under a request is restarted for the hang; its evidence says after how long."""
    supervisor, client = start_mock(before=("--config", str(LAPTOP), "--set", "log.format=json"))
    supervisor.until(client.is_ready, within=30.0, what="ready")
    judged = Judged(account, supervisor, client).ready()
    judged.fault("hang_steps")
    with asking(client):
        supervisor.until(lambda: supervisor.events("exited"), within=90.0, what="the end of the hang")
    (ended,) = supervisor.events("exited")
    assert ended["cause"] == "hang"
    told = next(line["sentence"] for line in supervisor.log() if "no progress" in str(line.get("sentence", "")))
    assert 12 <= float(told.partition("no progress for ")[2].split()[0]) <= 30, told
    judged.ready(2)
    judged.close()
