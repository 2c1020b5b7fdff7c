"""A ledger that a running supervisor cannot write: requests go on or are refused, and the gap is told everywhere.

The disk is full for one process only: a limit on the size of its files (RLIMIT_FSIZE), set and lifted from outside.
"""

import os
import resource
import shutil
import signal

import psutil
import pytest

from fakes.books import Books
from fakes.drain_scenario import Watcher
from fakes.supervisor_process import Account, StartMock, Supervisor
from vllm_supervisor.adapters.lock import StateLock
from vllm_supervisor.core.ledger import segment_name


def full(supervisor: Supervisor, books: Books) -> None:
    """Let every further byte in the ledger fail."""
    size = sum(path.stat().st_size for path in (books.state / "ledger").iterdir())
    psutil.Process(supervisor.pid).rlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def free(supervisor: Supervisor) -> None:
    """Lift the limit."""
    psutil.Process(supervisor.pid).rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_full_disk_costs_evidence_and_no_request(start_mock: StartMock, account: Account) -> None:
    """Requests are answered; status, metrics, log and exit status (82) tell it, and the file has their lines afterwards."""
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=40.0, what="ready")
    books = Books(account)
    assert client.chat().status_code == 200
    full(supervisor, books)
    assert [client.chat().status_code for _ in range(3)] == [200] * 3
    supervisor.until_said("the ledger cannot be written (File too large); requests go on without evidence", within=40.0)
    ledger = Watcher(account).status()["ledger"]
    assert (ledger["failed"], ledger["missing"], ledger["error"]) == (True, True, "File too large")
    assert "vllm_supervisor_ledger_failed 1\n" in client.get("/metrics").text
    free(supervisor)
    supervisor.until_said("the ledger can be written again", within=40.0)
    assert client.chat().status_code == 200
    assert not Watcher(account).status()["ledger"]["failed"]
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=40.0) == 82, supervisor.words()
    assert books.report["evidence_missing"]
    assert books.report["requests"]["completed"] == 5
    assert (ledger["lost"], ledger["late"]) == (0, 3)
    assert books.outcomes["completed", ""] == 5
    assert not books.events("gap")
    assert account.tool("ledger", "audit").returncode == 0


def test_a_required_ledger_closes_admission_and_opens_it_again(start_mock: StartMock, account: Account) -> None:
    """With ledger.required nothing goes to the engine without evidence; what was refused stands in the file afterwards."""
    supervisor, client = start_mock(before=("--set", "ledger.required=true"))
    supervisor.until(client.is_ready, within=40.0, what="ready")
    books = Books(account)
    full(supervisor, books)
    for _ in range(3):  # the first finds out, the others are refused at once
        refused = client.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "ledger_unavailable")
        assert "Retry-After" in refused.headers
    assert "POST /v1/chat/completions" not in supervisor.out.text
    status = Watcher(account).status()
    assert (status["admission"]["reason"], status["requests"]["failed"]) == ("ledger", 1)
    assert client.get("/readyz").status_code == 503
    free(supervisor)
    supervisor.until(client.is_ready, within=40.0, what="admission open again, though nobody asks for anything")
    (failed,) = books.events("outcome", outcome="failed")
    assert books.executions(failed["id"]) == [("not_started", "none")]
    assert books.events("accepted", id=failed["id"])
    assert client.chat().status_code == 200
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=40.0) == 0, (
        supervisor.words()
    )  # nothing went on without evidence, and none is missing
    assert account.tool("ledger", "audit").returncode == 0


@pytest.mark.parametrize("what", ["directory", "segment"])
def test_a_ledger_that_somebody_removes_is_made_again(what: str, start_mock: StartMock, account: Account) -> None:
    """Removed under a running supervisor, it comes back within moments; what was written before that is told as missing."""
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=40.0, what="ready")
    books = Books(account)
    assert client.chat().status_code == 200
    for path in (books.state / "ledger").iterdir():
        path.unlink()
    if what == "directory":
        shutil.rmtree(books.state / "ledger")
    supervisor.until(lambda: client.chat().status_code == 200 and books.events("gap"), within=40.0, what="a new file")
    supervisor.until_said("missing", within=40.0)
    assert client.chat().status_code == 200
    assert books.events("accepted")
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=40.0) == 82, supervisor.words()


def test_a_damaged_ledger_stops_no_start(start_mock: StartMock, account: Account) -> None:
    """What a killed run left is closed, what cannot be read of it is said once, and serving goes on in the next segment."""
    before = ("--name", "damaged")
    first, client = start_mock(before=before)
    first.until(client.is_ready, within=40.0, what="ready")
    assert client.chat().status_code == 200
    first.kill()
    state = Books(account).state
    with (state / "ledger" / segment_name(1)).open("ab") as file:
        file.write(b"[" * 100_000 + b"\n" + b"x" * 3_000_000 + b"\n" + bytes(3_000_000))
    os.mkfifo(state / "ledger" / segment_name(2))
    second, client = start_mock(before=before)
    second.until(client.is_ready, within=40.0, what="ready")
    second.until_said("evidence of earlier runs is missing: segment 1 line ", within=40.0)
    assert "is unreadable: not a whole JSON object, and 3 more; `ledger audit` lists it" in second.words()
    second.until_said("closed the books of 1 lost run(s)", within=40.0)
    assert client.chat().status_code == 200
    second.signal(signal.SIGTERM)
    assert second.ends(within=40.0) == 0, second.words()
    told = account.tool("ledger", "audit")
    assert (told.returncode, told.stderr) == (1, "")
    assert told.stdout.count("EVIDENCE MISSING: segment ") == 4
    assert Books(account).outcomes["completed", ""] == 2


def test_a_state_directory_that_somebody_removes_stays_ours(start_mock: StartMock, account: Account) -> None:
    """Made again, it is locked again: a second supervisor is refused, and the audit calls no loss a pruning."""
    supervisor, client = start_mock(before=("--name", "ours"))
    supervisor.until(client.is_ready, within=40.0, what="ready")
    books = Books(account)
    shutil.rmtree(books.state)
    supervisor.until(lambda: client.chat().status_code == 200 and books.events("gap"), within=40.0, what="a new file")
    second, _ = start_mock(before=("--name", "ours"))
    assert second.ends(within=40.0) == 78, second.words()
    assert f"is held by the supervisor 'ours' (pid {supervisor.pid}" in second.words()
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=40.0) == 82, supervisor.words()
    told = account.tool("ledger", "audit")
    assert told.returncode == 1
    assert "its beginning is missing: pruned or removed" in told.stdout


def test_a_state_directory_that_somebody_else_took_is_not_written(start_mock: StartMock, account: Account) -> None:
    """Whoever locks a directory that was removed under us keeps it alone; the ledger fails, and their name is said."""
    supervisor, client = start_mock()
    supervisor.until(client.is_ready, within=40.0, what="ready")
    state = Books(account).state
    theirs, gone = state.with_name("theirs"), state.with_name("gone")
    lock = StateLock(theirs, run="other", name="rival")
    state.rename(gone)
    theirs.rename(state)
    shutil.rmtree(gone)
    supervisor.until(lambda: client.chat().status_code == 200, within=40.0, what="an answer")
    supervisor.until_said("is held by the supervisor 'rival'", within=40.0)
    assert client.chat().status_code == 200
    assert Watcher(account).status()["ledger"]["failed"]
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=40.0) == 82, supervisor.words()
    assert [path.name for path in state.iterdir()] == ["lock"]
    lock.release()
