"""Keeps an eye on the ledger's own health: says when it fails and when it works again, and closes admission if it must.

Rules:
* Each change is said once, another reason to fail too, with what is missing so far; evidence that is gone stays reported until the end of the run.
* With `ledger.required` admission is closed while the file cannot be written, for a reason of its own.
* While it fails it is tried again each second, also when nobody asks for anything.
"""

from collections.abc import Callable

from vllm_supervisor.core.admission import Gate
from vllm_supervisor.core.ledger import LedgerHealth, missing_words
from vllm_supervisor.core.words import ClosedReason
from vllm_supervisor.runtime.ledger_writer import LedgerWriter


class LedgerGuard:
    """Looks when it is asked to."""

    def __init__(
        self, writer: LedgerWriter, gate: Gate, *, required: bool, say: Callable[[str, str, str], None]
    ) -> None:
        """`required` is `ledger.required`; `say` takes event, sentence and level."""
        self._writer = writer
        self._gate = gate
        self._required = required
        self._say = say
        self._failed = False
        self._error = ""
        self._missing = 0

    def look(self) -> None:
        """Compare with the last look, and act on what is new."""
        health = self._writer.health()
        if health.failed:
            self._writer.retry()
        if health.failed and not (self._failed and health.error == self._error):
            self._fail(health)
        elif self._failed and not health.failed:
            self._recover(health)
        elif not health.failed and health.missing_n > self._missing:  # it failed and recovered between two looks
            self._say("ledger_evidence_missing", f"evidence is missing: {missing_words(health)}", "error")
        self._missing = health.missing_n

    def _fail(self, health: LedgerHealth) -> None:
        self._failed, self._error = True, health.error
        effect = "admission is closed" if self._required else "requests go on without evidence"
        self._say("ledger_failed", f"the ledger cannot be written ({health.error}); {effect}", "error")
        if self._required:
            self._gate.close(ClosedReason.LEDGER)

    def _recover(self, health: LedgerHealth) -> None:
        self._failed = False
        self._gate.reopen(ClosedReason.LEDGER)
        gone = missing_words(health) or "nothing"
        self._say("ledger_works", f"the ledger can be written again; missing: {gone}", "warning")
