"""The engine's own word on its requests: the beacon's events, read soon after they come and to the last one.

Rules:
* Follows each incarnation from its spawn until its processes are proven gone: what the scheduler said between TERM and
  the end counts as well, and a stop that comes before the first look at the engine's health misses nothing.
* Nobody is asked while nothing is open: an idle engine costs one look an interval.
"""

from collections.abc import Callable

import trio

from vllm_supervisor.adapters.beacon import BeaconReader
from vllm_supervisor.core.admission import HOLD_S, Gate
from vllm_supervisor.core.samples import BeaconSample
from vllm_supervisor.runtime.incarnation import Incarnation
from vllm_supervisor.runtime.journal import LedgerJournal

EVERY = 0.1  # seconds between reads while requests are in flight or unsettled


class Testimony:
    """Passes the events of the running incarnation on to the journal; one for the supervisor's life."""

    def __init__(
        self,
        *,
        current: Callable[[], Incarnation | None],
        gate: Gate,
        journal: LedgerJournal,
        interval: float,
        heard: Callable[[], None],
    ) -> None:
        """`interval` in seconds, between reads of an idle engine; `heard` is called after events were passed on."""
        self._current = current
        self._gate = gate
        self._journal = journal
        self._interval = interval
        self._heard = heard
        self._followed: Incarnation | None = None
        self._reader: BeaconReader | None = None
        self._lost_events = 0
        self._reports = False
        self._busy = trio.Event()
        gate.on_admit(self._wake)
        gate.hold_for(self.lingering)

    async def run(self) -> None:
        """Read for ever."""
        while True:
            if self._gate.in_flight or self._journal.following:
                await trio.sleep(EVERY)
            else:
                self._busy = trio.Event()
                with trio.move_on_after(self._interval):
                    await self._busy.wait()
            self.read()

    def read(self) -> tuple[BeaconSample, ...]:
        """Take what has come and return the samples of the moment, one for each living EngineCore that reports."""
        current = self._current()
        if current is not self._followed:
            self.close()
            if current is not None and current.body.beacon is not None:
                self._followed, self._reader = current, BeaconReader(current.body.beacon)
        if self._reader is None:
            return ()
        samples = self._reader.read()
        self._reports = self._reports or bool(samples)
        self._take(self._reader)
        return samples

    @property
    def awaited(self) -> bool:
        """Whether the engine may still say something of requests whose exchange has ended."""
        return self._reports and self._journal.following > 0

    def lingering(self) -> int:
        """How many requests hold their place beyond their exchange: those that the engine has and will tell the end of."""
        return self._journal.lingering(HOLD_S) if self._reports else 0

    def close(self) -> None:
        """Take the last words of an incarnation that is gone, and forget it."""
        if self._reader is not None:
            self._reader.read()
            while self._take(self._reader):
                pass
            self._reader.close()
        self._followed = self._reader = None
        self._lost_events, self._reports = 0, False

    def _take(self, reader: BeaconReader) -> bool:
        events = reader.events()
        if reader.lost_events > self._lost_events:
            self._lost_events = reader.lost_events
            self._journal.testimony_lost()
        if events:
            self._journal.testimony(events)
            self._heard()
        return bool(events)

    def _wake(self) -> None:
        self._busy.set()
