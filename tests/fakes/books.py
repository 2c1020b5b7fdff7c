"""What a run of the supervisor has left in its state directory: the drain report, the ledgers' lines, the audit."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fakes.supervisor_process import Account
from vllm_supervisor.adapters import ledger_reader
from vllm_supervisor.core.audit import Audit, audit
from vllm_supervisor.core.ledger_parser import Record


class Books:
    """Reads the files of an account's only instance, each time anew."""

    def __init__(self, account: Account) -> None:
        """Find its state directory."""
        (self.state,) = Path(account.home, "state", "vllm-supervisor").iterdir()

    @property
    def report(self) -> dict[str, Any]:
        """The drain report."""
        found: dict[str, Any] = json.loads(self.state.joinpath("drain.json").read_text(encoding="utf-8"))
        return found

    @property
    def records(self) -> list[Record]:
        """Every line of the ledgers."""
        return list(ledger_reader.records(self.state / "ledger"))

    def events(self, name: str, **fields: object) -> list[Record]:
        """The lines of one kind whose fields are these."""
        return [one for one in self.records if one["event"] == name and fields.items() <= one.items()]

    @property
    def audit(self) -> Audit:
        """The audit of all runs."""
        return audit(ledger_reader.fold(self.state / "ledger"))

    @property
    def outcomes(self) -> Counter[tuple[str, str]]:
        """How many requests ended so: outcome and why."""
        return Counter((one["outcome"], one["why"]) for one in self.events("outcome"))

    def executions(self, request_id: str) -> list[tuple[str, str]]:
        """What was said of one request's execution, in order: state and evidence."""
        return [(one["state"], one["evidence"]) for one in self.events("execution", id=request_id)]

    def last_executions(self, *, why: str | None = None) -> Counter[tuple[str, str]]:
        """The last word on each execution, of the requests that ended for `why`."""
        ids = [one["id"] for one in self.events("outcome") if why is None or one["why"] == why]
        return Counter(self.executions(name)[-1] for name in ids)
