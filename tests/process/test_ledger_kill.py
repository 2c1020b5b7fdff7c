"""The ledger under SIGKILL: what the writer reported as written is in the file, whenever it dies."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.core.audit import Fate, audit, recover

CHILD = """
import sys
from pathlib import Path
import trio
from fakes.ledger_kit import identity, outcome, request, run_journal

async def body(journal, writer):
    writer.recovered({})
    async def one(number):
        request_id = f"run1-{number}"
        await journal.accepted(request(request_id, sent_at=1.0, engine_id=request_id))
        sys.stdout.write(request_id + "\\n")
        sys.stdout.flush()
        journal.outcome(outcome(request_id))
    number = 0
    while True:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                number += 1
                nursery.start_soon(one, number)

run_journal(Path(sys.argv[1]), body, who=identity("run1"), segment_bytes=20_000)
"""


@pytest.mark.parametrize("seed", range(12))
def test_nothing_acknowledged_is_lost(tmp_path: Path, seed: int) -> None:
    """Every id whose acceptance was acknowledged before SIGKILL stands in the file, and recovery balances the account."""
    chosen = random.Random(seed).randrange(1, 600)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, env=environ, text=True
    ) as child:
        assert child.stdout is not None
        acknowledged = [child.stdout.readline().strip() for _ in range(chosen)]
        child.send_signal(signal.SIGKILL)
        acknowledged += [text.strip() for text in child.stdout if text.endswith("\n")]
    accepted = {record["id"] for record in ledger_reader.records(tmp_path) if record["event"] == "accepted"}
    assert set(acknowledged) <= accepted
    fold = ledger_reader.fold(tmp_path)
    for entry in recover(fold, {"run1": Fate.GONE}, "me"):
        stamp = {
            "t": 0.0,
            "at": "2027-01-01T00:00:00.000Z",
            "boot": "b",
            "run": entry.run,
            "inc": entry.inc,
            "by": "me",
        }
        assert fold.add({**stamp, "event": entry.event, **entry.fields}) == ""
    assert audit(fold).holds
    assert recover(fold, {"run1": Fate.GONE}, "me") == []
