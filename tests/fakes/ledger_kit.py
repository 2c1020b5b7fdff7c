"""What the tests of the ledgers share: a run's identity, a journal on a directory, and short forms of facts."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from vllm_supervisor.adapters.ledger_file import FileOps, LedgerFile
from vllm_supervisor.core.admission import OpenRequest
from vllm_supervisor.core.journal import RequestOutcome
from vllm_supervisor.core.ledger import Clock, LedgerPolicy, RequestIds
from vllm_supervisor.core.words import EndedBy, Outcome, RequestClass
from vllm_supervisor.runtime.journal import LedgerJournal
from vllm_supervisor.runtime.ledger_writer import LedgerWriter
from vllm_supervisor.runtime.run_identity import LineFactory, RunIdentity

LIMIT_S = 30.0


def identity(run: str = "run1", boot: str = "boot1", pid: int = 0, start: int = 0) -> RunIdentity:
    """Name a run."""
    return RunIdentity(run=run, boot=boot, release="r1", version="0", name="test", pid=pid, start=start)


class TickingClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> Clock:
        """Return it as the ledger takes it."""
        return Clock(monotonic=lambda: self.now, wall=lambda: 1_700_000_000.0 + self.now)


def request(request_id: str, request_class: RequestClass = RequestClass.CHAT, **fields: object) -> OpenRequest:
    """Build an admitted request."""
    made = OpenRequest(request_id, request_class, 0.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def outcome(request_id: str, result: Outcome = Outcome.COMPLETED, **fields: object) -> RequestOutcome:
    """Build an outcome."""
    values: dict[str, object] = {
        "request_class": RequestClass.CHAT,
        "why": "" if result is Outcome.COMPLETED else "client_left",
        "status": 200,
        "stream": True,
        "ended_by": EndedBy.ENGINE if result is Outcome.COMPLETED else EndedBy.CLIENT,
        "bytes": 1,
        "first_byte_s": None,
        "duration_s": 1.0,
        "marker": "",
    }
    return RequestOutcome(id=request_id, outcome=result, **(values | fields))  # type: ignore[arg-type]


Body = Callable[[LedgerJournal, LedgerWriter], Awaitable[None]]


def run_journal(
    directory: Path,
    body: Body,
    *,
    who: RunIdentity | None = None,
    clock: Clock | None = None,
    ops: FileOps | None = None,
    policy: LedgerPolicy | None = None,
    segment_bytes: int = 1 << 20,
) -> None:
    """Run `body` with a journal whose life line is written, as one run of the supervisor."""
    who, clock = who or identity(), clock or TickingClock().clock()
    factory = LineFactory(who, clock)
    writer = LedgerWriter(
        LedgerFile(directory, segment_bytes, ops=ops),
        policy or LedgerPolicy(sync="off"),
        header=factory.header,
        gap=factory.gap,
    )
    journal = LedgerJournal(who, clock, writer)

    async def main() -> None:
        with trio.fail_after(LIMIT_S):
            writer.start()
            journal.life()
            await body(journal, writer)
            assert await writer.aclose(LIMIT_S)

    trio.run(main)


def ids(run: str = "run1") -> Callable[[], str]:
    """Return the id source of a run."""
    return RequestIds(run)
