"""Who owns which time limit of a stop, and whether they fit into the one that is not ours.

Rules:
* outer limit = hook (as measured) + propagation + drain + engine stop + documentation + reserve. Nothing counts twice:
  what the hook has waited is taken off the propagation first, and off the outer limit always.
* Too short an outer limit shrinks the drain and nothing else, and that is said. A limit that does not even hold the
  rest is said louder; nothing is cut that would leave the engine or the ledgers undone.
* Durations in seconds; an outer limit of None means that nobody will kill us.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """What the configuration and the world say, in seconds."""

    outer: float | None
    outer_owner: str  # where the outer limit was read, for people
    propagation: float
    drain: float
    engine_stop: float
    documentation: float
    reserve: float
    server_graceful: float | None = None  # vLLM's --shutdown-timeout, None when the engine has no such thing
    request_deadline: float = 0.0  # front_door.request_deadline, 0: none


@dataclass(frozen=True, slots=True)
class Budget:
    """The plan of one stop, in seconds. `missing` is what even a drain of zero lacks; `sentence` says all of it."""

    outer: float | None
    hook: float
    propagation: float
    drain: float
    engine_stop: float
    documentation: float
    reserve: float
    shrunk_by: float
    missing: float
    sentence: str

    @property
    def fits(self) -> bool:
        """Whether the plan is what was configured."""
        return self.shrunk_by == 0 and self.missing == 0

    @property
    def total(self) -> float:
        """How long the stop may take from the signal on, the reserve included and the hook not."""
        return self.propagation + self.drain + self.engine_stop + self.documentation + self.reserve


NO_PLAN = Budget(None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "no stop was planned")


def plan(limits: Limits, hook: float = 0.0) -> Budget:
    """Divide the outer limit; `hook` is how long a pre-stop hook has been at it already, on the same clock."""
    if limits.outer is not None and hook >= limits.outer:
        hook = 0.0  # nobody would have let it wait longer than the whole limit: it belonged to another occasion
    propagation = max(0.0, limits.propagation - hook)
    fixed = propagation + limits.engine_stop + limits.documentation + limits.reserve
    room = None if limits.outer is None else limits.outer - hook - fixed
    drain = limits.drain if room is None else min(limits.drain, max(0.0, room))
    budget = Budget(
        outer=limits.outer,
        hook=hook,
        propagation=propagation,
        drain=drain,
        engine_stop=limits.engine_stop,
        documentation=limits.documentation,
        reserve=limits.reserve,
        shrunk_by=limits.drain - drain,
        missing=0.0 if room is None else max(0.0, -room),
        sentence="",
    )
    return replace(budget, sentence=_sentence(budget, limits))


def _sentence(budget: Budget, limits: Limits) -> str:
    if budget.outer is None:
        return f"no outer limit is known; the drain has {_s(budget.drain)}"
    needed = f"{_s(budget.hook + budget.total + budget.shrunk_by)} needed, {_s(budget.outer)} allowed by {limits.outer_owner}"
    if budget.missing:
        return f"{needed}: the stop does not fit by {_s(budget.missing)} even without a drain; raise the outer limit"
    if budget.shrunk_by:
        return f"{needed}: the drain is shortened from {_s(limits.drain)} to {_s(budget.drain)}"
    return (
        f"{_s(budget.hook + budget.total)} needed, {_s(budget.outer)} allowed by {limits.outer_owner}: everything fits"
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One time limit. `value` in seconds, None for "no limit"; `fits` None where there is nothing to compare."""

    limit: str
    value: float | None
    owner: str
    covers: str
    not_guaranteed: str
    fits: bool | None


def matrix(limits: Limits, budget: Budget) -> tuple[Row, ...]:
    """List who owns which limit, what it covers, what it does not guarantee, and whether it fits."""
    graceful, deadline = limits.server_graceful, limits.request_deadline
    return (
        Row(
            "outer termination limit", budget.outer, limits.outer_owner,
            "everything from the first signal to the last process",
            "that anything was finished: when it ends, everything is killed where it stands",
            None if budget.outer is None else budget.missing == 0,
        ),
        Row(
            "pre-stop hook", budget.hook, "whoever runs `drain --hook` before the signal",
            "waiting for requests before the signal; runs on the outer limit's clock",
            "that a signal follows: a hook that is not followed by one leaves admission closed",
            None if budget.outer is None else budget.hook < budget.outer,
        ),
        Row(
            "propagation", budget.propagation, "drain.propagation",
            "the time routes need to notice the withdrawn readiness; requests are refused all the while",
            "that every route has noticed: the time of the last late request is measured for that",
            None,
        ),
        Row(
            "drain", budget.drain, "drain.budget",
            "finishing what was accepted",
            "that it suffices: what is left is ended with an error and written down as cut",
            budget.shrunk_by == 0,
        ),
        Row(
            "server's own graceful time", graceful, "vLLM's --shutdown-timeout",
            "requests that vLLM itself still runs after TERM",
            "anything for requests through the front door, which has drained before; with several API servers nothing at all",
            None if graceful is None else graceful <= limits.engine_stop,
        ),
        Row(
            "request deadline", deadline or None, "front_door.request_deadline",
            "one request of one caller, in a drain as at any time",
            "that the engine stops working on it: only its own word or its end proves that",
            None if not deadline else deadline <= budget.drain,
        ),
        Row(
            "worker life", budget.engine_stop, "engine.stop_grace",
            "the engine's processes from TERM to KILL",
            "that KILL removes them: a process in the kernel's hands can outlive it, which is status 81",
            None if budget.outer is None else budget.engine_stop <= budget.outer,
        ),
        Row(
            "documentation", budget.documentation, "drain.documentation",
            "writing both ledgers' ends and the drain report",
            "a disk that answers: what cannot be written in time is reported as missing evidence",
            None,
        ),
        Row(
            "reserve", budget.reserve, "drain.reserve",
            "what nobody planned: a slow kernel, a late signal",
            "anything in particular",
            None,
        ),
    )  # fmt: skip


def as_json(limits: Limits, budget: Budget) -> dict[str, object]:
    """Build what `GET /timeouts` answers: the sentence, whether all fits, and one object a row."""
    rows = [{name: getattr(row, name) for name in Row.__slots__} for row in matrix(limits, budget)]
    return {"sentence": budget.sentence, "fits": budget.fits, "shrunk_by": budget.shrunk_by, "rows": rows}


def _s(seconds: float) -> str:
    return f"{seconds:.1f}".removesuffix(".0") + " s"
