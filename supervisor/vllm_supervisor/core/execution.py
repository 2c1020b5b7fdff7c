"""The execution register: what is known of the engine's work for each accepted request, and what it rests on.

Rules:
* It is not the request's outcome. A client may be long gone while its state here is `running`, and a request may be
  complete while its work goes on (`background: true`); only evidence moves a state.
* Closing a connection, asking for an abort, and the engine's own word are three different things. The first two leave
  the state at `running`; only the engine's word, the counts, or the death of its processes confirm an end.
* Engine requests are matched through the id the engine was given. An id that two unsettled requests share names
  neither: for both of them only counts and the death of the process remain. So it is after lost testimony.
* A request may be several engine requests (`n`, several prompts). It has ended when each one seen has ended, and not
  before its exchange with us has.
* Counts prove an end only when two readings in a row agree and both began after the exchange had ended.
* Bounded: at most `limit` ended exchanges are followed; beyond it the oldest becomes `unknown`.

Source of the id shapes: vLLM 0.32, `entrypoints/*/serving.py` and `v1/engine/input_processor.py` (`assign_request_id`
appends `-` and eight hex digits), `v1/engine/parallel_sampling.py` (prefix `INDEX_` for `n`); of the status names:
`v1/request.py` (`RequestStatus`).
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vllm_supervisor.core.accounts import FINAL, FOLLOWS
from vllm_supervisor.core.samples import EventKind, RequestEvent
from vllm_supervisor.core.words import Evidence, ExecutionState

# PREFIX-ID, then a tail that depends on the prefix, then the random suffix (absent if randomization is disabled).
_SHAPE = re.compile(r"(?:\d+_)?([a-z]+(?:-tokens|-scoring)?)-(.+)", re.DOTALL)
_RESPONSE = re.compile(r"(?:\d+_)?(resp_[^_-]+)(?:_\d+)?(?:-[0-9a-f]{8})?")
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_UNDERSCORED_TAIL = re.compile(r"_\d+$")
_HYPHENED_TAIL = re.compile(r"-\d+$")
_TAILS: dict[str, tuple[re.Pattern[str], bool]] = {  # prefix: (tail, always there)
    "chatcmpl": (_UNDERSCORED_TAIL, False),
    "cmpl": (_HYPHENED_TAIL, True),
}

MAX_PARTS = 4_096  # engine requests followed for one of ours; one with more is settled by counts

_STOPPED = frozenset({"FINISHED_ABORTED", "FINISHED_ERROR"})


def candidates(engine_request_id: str) -> list[str]:
    """List what the id we gave may have been, for a request id of the engine's scheduler; the likeliest first."""
    if response := _RESPONSE.fullmatch(engine_request_id):
        return [response[1]]
    shape = _SHAPE.fullmatch(engine_request_id)
    if shape is None:
        return []
    tail, always = _TAILS.get(shape[1], (_HYPHENED_TAIL, False))
    found: list[str] = []
    for base in (_SUFFIX.sub("", shape[2]), shape[2]):
        cut = tail.sub("", base)
        for candidate in (cut,) if always else (base, cut):
            if candidate and candidate not in found:
                found.append(candidate)
    return found


class Change(NamedTuple):
    """One line for the execution ledger."""

    id: str
    state: ExecutionState
    evidence: Evidence


@dataclass(slots=True)
class _Entry:
    id: str
    inc: int
    began: float = 0.0  # when it was admitted
    key: str | None = None
    state: ExecutionState | None = None
    evidence: Evidence = Evidence.NONE
    ended_at: float | None = None  # when its exchange with us ended
    by_counts_only: bool = False
    engine_gone: bool = False
    parts: dict[str, str | None] | None = None  # engine request id -> status, None while it runs; made when one is seen
    first_agreement: float | None = None  # when the first of two readings that agree began


class ExecutionRegister:
    """One entry for each accepted request until its execution is final. Not thread-safe."""

    def __init__(self, limit: int = 10_000, strays: int = 2_048) -> None:
        """`limit` bounds the ended exchanges followed, `strays` the testimony kept for ids not known yet."""
        self.states: Counter[ExecutionState] = Counter()
        self._limit = limit
        self._strays_limit = strays
        self._entries: dict[str, _Entry] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._by_key: dict[str, list[_Entry]] = {}
        self._strays: OrderedDict[str, list[RequestEvent]] = OrderedDict()

    @property
    def background(self) -> int:
        """How many answered requests still run in the engine (`background: true`); a drain waits for them."""
        return len(self.in_background())

    def in_background(self) -> list[tuple[str, float]]:
        """List those requests, oldest end first: id, and when it was admitted (monotonic seconds)."""
        return [
            (name, entry.began)
            for name in self._ended
            if (entry := self._entries[name]).state is ExecutionState.RUNNING and entry.evidence is Evidence.ANSWER
        ]

    @property
    def following(self) -> int:
        """How many ended exchanges are followed, because their execution is not final."""
        return len(self._ended)

    def lingering(self, since: float) -> int:
        """How many exchanges ended after `since` (monotonic seconds) whose request the engine has not let go."""
        count = 0
        for name in reversed(self._ended):
            if (self._entries[name].ended_at or 0.0) <= since:
                break
            count += 1
        return count

    def state(self, request_id: str) -> ExecutionState | None:
        """Say what is known of a request that is not settled; None also for one that is."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.state

    def unsettled(self) -> list[Change]:
        """List every id whose exchange has ended and whose execution is not final, oldest first."""
        return [
            Change(name, entry.state or ExecutionState.UNKNOWN, entry.evidence)
            for name in self._ended
            if (entry := self._entries[name])
        ]

    # -- the request's own life --------------------------------------------------------------------------------

    def begin(self, request_id: str, inc: int, began: float = 0.0) -> None:
        """Take up a request that was accepted during incarnation `inc` and admitted at `began` (monotonic seconds)."""
        self._entries[request_id] = _Entry(request_id, inc, began)

    def sent(self, request_id: str, key: str, inc: int) -> list[Change]:
        """Say which id the engine was given (or has told, for `/v1/responses`) and which incarnation got it."""
        entry = self._entries.get(request_id)
        if entry is None or entry.key == key:
            return []
        self._unbind(entry)
        entry.key, entry.inc, entry.engine_gone = key, inc, False
        sharers = self._by_key.setdefault(key, [])
        sharers.append(entry)
        if len(sharers) > 1:
            for sharer in sharers:
                sharer.by_counts_only = True
        for event in self._strays.pop(key, ()):
            self._testify(entry, event)
        return self._judge(entry)

    def settle(self, request_id: str, state: ExecutionState) -> bool:
        """Take a final state for a request of which nothing was said so far; False if it is not such a one."""
        entry = self._entries.get(request_id)
        if entry is None or entry.state is not None:
            return False
        self.states[state] += 1
        self._drop(entry)
        return True

    def told(self, request_id: str, state: ExecutionState, evidence: Evidence) -> list[Change]:
        """Take what the front door knows. What contradicts better evidence is dropped."""
        entry = self._entries.get(request_id)
        return [] if entry is None else self._move(entry, state, evidence)

    def ended(self, request_id: str, now: float) -> list[Change]:
        """Say that the exchange with us has ended; from here on only the engine's side can move the state."""
        entry = self._entries.get(request_id)
        if entry is None or entry.ended_at is not None:
            return []
        entry.ended_at = now
        changes = [] if entry.state else self._move(entry, ExecutionState.RUNNING, Evidence.CONNECTION_CLOSED)
        changes += self._judge(entry)
        if entry.engine_gone:
            changes += self._move(entry, ExecutionState.CONFIRMED_STOPPED, Evidence.PROCESS_GONE)
        if request_id in self._entries:
            self._ended[request_id] = None
            if len(self._ended) > self._limit:
                oldest = self._entries[next(iter(self._ended))]
                changes += self._move(oldest, ExecutionState.UNKNOWN, Evidence.NONE)
                self._drop(oldest)
        return changes

    # -- what the engine's side says ---------------------------------------------------------------------------

    def testimony(self, events: Iterable[RequestEvent]) -> list[Change]:
        """Take what the scheduler reported of its requests, in order."""
        changes: list[Change] = []
        for event in events:
            keys = candidates(event.id)
            entries = [entry for key in keys for entry in self._by_key.get(key, ())]
            if len(entries) == 1:
                self._testify(entries[0], event)
                changes += self._judge(entries[0])
            elif entries:  # two of ours could be meant
                for entry in entries:
                    entry.by_counts_only = True
            elif _RESPONSE.fullmatch(event.id):  # its id reaches us with the answer, after the work began
                self._keep(keys[0], event)
        return changes

    def testimony_lost(self) -> None:
        """Say that events may have been missed: what was seen in part proves nothing any more."""
        self._strays.clear()
        for entry in self._entries.values():
            entry.by_counts_only = True

    def counts(self, reported: int, vouched: int, began: float) -> list[Change]:
        """Compare counts: the engine reports `reported` requests, `vouched` of ours are surely still in it.

        `began` is when the reading began (monotonic seconds). An end is confirmed when two readings in a row, both
        begun after the exchange ended, report no more than what is vouched for.
        """
        changes: list[Change] = []
        for name in list(self._ended):
            entry = self._entries[name]
            if reported > vouched or entry.ended_at is None or began <= entry.ended_at:
                entry.first_agreement = None
            elif entry.first_agreement is None:
                entry.first_agreement = began
            elif began > entry.first_agreement:
                changes += self._move(entry, ExecutionState.CONFIRMED_STOPPED, Evidence.COUNTS)
        return changes

    def engine_gone(self, inc: int) -> list[Change]:
        """Say that every process of incarnation `inc` and of those before is proven gone."""
        changes: list[Change] = []
        for entry in list(self._entries.values()):
            if entry.inc > inc:
                continue
            if entry.ended_at is not None:
                changes += self._move(entry, ExecutionState.CONFIRMED_STOPPED, Evidence.PROCESS_GONE)
            elif entry.key is not None:  # its exchange may yet report a whole answer; else it ends with this evidence
                entry.engine_gone = True
        return changes

    def finish(self) -> list[Change]:
        """Close the register at the end of a run: what is not settled is `unknown`."""
        changes: list[Change] = []
        for entry in list(self._entries.values()):
            changes += self._move(entry, ExecutionState.UNKNOWN, Evidence.NONE)
        return changes

    # -- inside ------------------------------------------------------------------------------------------------

    def _keep(self, key: str, event: RequestEvent) -> None:
        kept = self._strays.setdefault(key, [])
        kept.append(event)
        if len(kept) > MAX_PARTS:
            del self._strays[key]
        elif len(self._strays) > self._strays_limit:
            self._strays.popitem(last=False)

    @staticmethod
    def _testify(entry: _Entry, event: RequestEvent) -> None:
        status = event.status if event.kind is EventKind.FINISHED else None
        parts = entry.parts
        if parts is None:
            parts = entry.parts = {}
        if status is not None or event.id not in parts:
            parts[event.id] = status
        if len(parts) > MAX_PARTS:
            parts.clear()
            entry.by_counts_only = True

    def _judge(self, entry: _Entry) -> list[Change]:
        """Conclude from the parts: all ended, and nobody on our side waits for more."""
        if entry.by_counts_only or entry.ended_at is None or not entry.parts:
            return []
        statuses = list(entry.parts.values())
        if any(status is None for status in statuses):
            return []
        stopped = any(status in _STOPPED for status in statuses)
        state = ExecutionState.CONFIRMED_STOPPED if stopped else ExecutionState.COMPLETED
        return self._move(entry, state, Evidence.ENGINE_CONFIRMED)

    def _move(self, entry: _Entry, state: ExecutionState, evidence: Evidence) -> list[Change]:
        if state not in FOLLOWS[entry.state] or entry.id not in self._entries:
            return []
        if entry.state is state and entry.evidence is evidence:
            return []
        if entry.state is not None:
            self.states[entry.state] -= 1
        self.states[state] += 1
        entry.state, entry.evidence = state, evidence
        if state in FINAL:
            self._drop(entry)
        return [Change(entry.id, state, evidence)]

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.id]
        if entry.ended_at is not None:
            self._ended.pop(entry.id, None)
        if entry.key is not None:
            self._unbind(entry)

    def _unbind(self, entry: _Entry) -> None:
        if entry.key is not None and (sharers := self._by_key.get(entry.key)):
            sharers.remove(entry)
            if not sharers:
                del self._by_key[entry.key]
