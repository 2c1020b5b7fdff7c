"""An incarnation has ended and nothing of it is left: read its end, ask the restart policy, say it once.

Rules:
* An end we asked for (stop, commanded restart) is clean whatever the number.
* An end we forced because the engine was lost (its core died, it hung, its load stood still) is a failure with our own
  words for it, whatever the number of our KILL was; what the engine itself had printed as the reason stands behind them.
* An engine the memory guard killed ran out of memory, whatever its last words were.
* The budget counts failures only; which kind is decided here and nowhere else.
"""

from dataclasses import replace

from vllm_supervisor.core import orders, restart
from vllm_supervisor.core.exit_status import Asked, ExitEvidence, ExitReading, interpret
from vllm_supervisor.core.facts import SweepDone
from vllm_supervisor.core.lifecycle import Ending, LastRestart, Moment, Policy, State, Why
from vllm_supervisor.core.restart import Ended, EndKind, GiveUp, Restart
from vllm_supervisor.core.signatures import Cause, Repeat, StartPhase

REQUESTED = (Why.STOP, Why.COMMANDED)
FOLLOWS_AFTER = 60.0  # seconds: a headless node with a mistake in its options ends earlier than that
LESS_MEMORY = "lower --gpu-memory-utilization or --max-model-len, or set --kv-cache-memory-bytes"
# The class of an end that we forced, where nothing the engine printed names a better one.
LABELS = {
    Why.HANG: "it hung",
    Why.FAILING: "it answered nothing but errors",
    Why.START_TIMEOUT: "its load showed no progress",
    Why.CORE_DIED: "a part of it died",
    Why.REPORTED_DEAD: "it reported that it is dead",
}
# Ends whose cause is what we saw, not how the process then ended.
SEEN = (Why.HANG, Why.FAILING, Why.START_TIMEOUT)
# What a person can do about an engine that we ended ourselves: our own signal says nothing of the reason.
READ_LINES = "read the engine's last lines"
REMEDIES = {
    Why.HANG: "read the evidence bundle (incidents/ in the state directory)",
    Why.FAILING: "read the evidence bundle (incidents/ in the state directory)",
    Why.START_TIMEOUT: f"{READ_LINES}; if this load is only slow, raise engine.start_timeout",
}


def read(ending: Ending, evidence: ExitEvidence) -> ExitReading:
    """Say what the end means."""
    if ending.raw is None:
        return _not_spawned(ending)
    asked = Asked.NOTHING
    if ending.why in REQUESTED:
        asked = Asked.KILL if ending.kill_sent else Asked.TERM if ending.term_sent else Asked.NOTHING
    phase = StartPhase.SERVING if ending.was_ready else StartPhase.LOADING
    reading = interpret(ending.raw, asked, phase, evidence)
    if ending.why in REQUESTED or ending.why is Why.NONE:
        return reading
    if ending.why is Why.MEMORY:
        return replace(
            reading, cause=Cause.OUT_OF_MEMORY, repeat=Repeat.SPECIAL, sentence=ending.why_sentence,
            meaning=ending.why_sentence, mend=LESS_MEMORY, signature=None, retries=None,
            label="out of memory",
        )  # fmt: skip
    told = f"{ending.why_sentence}: {reading.root}" if reading.root else ending.why_sentence
    # Without a better cause the number shows only our own KILL.
    cause = Cause.PART_DIED if reading.cause is Cause.KILLED and ending.why not in SEEN else reading.cause
    label = reading.label if reading.signature else LABELS[ending.why]
    return replace(reading, cause=cause, sentence=told, meaning=told, mend=_remedy(ending, reading), label=label)


def _remedy(ending: Ending, reading: ExitReading) -> str:
    if reading.signature is not None:
        return reading.mend
    return REMEDIES.get(ending.why, READ_LINES if reading.cause is Cause.KILLED else reading.mend)


def _not_spawned(ending: Ending) -> ExitReading:
    if ending.why in REQUESTED:
        cause, clean, sentence = Cause.REQUESTED, True, "the engine was ended by us"
    else:
        cause, clean, sentence = Cause.NOT_EXECUTABLE, False, ending.spawn_problem
    repeat, retries = (Repeat.TRANSIENT, None) if ending.spawn_may_pass else (Repeat.DETERMINISTIC, 0)
    return ExitReading(
        cause, clean=clean, repeat=repeat, sentence=sentence, meaning=sentence, mend="", signature=None,
        retries=retries, fingerprint=sentence, label="its command could not be started",
    )  # fmt: skip


def kind(ending: Ending, alive_s: float, policy: Policy) -> EndKind:
    """Which budget the end is counted in; `alive_s` is how long the engine lived."""
    if ending.why in REQUESTED:
        return EndKind.COMMANDED
    if policy.headless and ending.why is Why.NONE and alive_s >= FOLLOWS_AFTER:
        return EndKind.FOLLOWED
    if ending.why is Why.HANG:
        return EndKind.HANG
    return EndKind.CRASH if ending.was_ready else EndKind.START_FAILURE


def judge(
    state: State, ending: Ending, swept: SweepDone, moment: Moment, policy: Policy
) -> tuple[State, Restart | GiveUp, list[orders.Order]]:
    """Close the books of one incarnation; return what the policy wants next and what is to be said."""
    evidence = replace(
        swept.evidence,
        alive_s=None if state.spawned_at is None else ending.at - state.spawned_at,
        died_first=state.first_dead,
    )
    reading = read(ending, evidence)
    ended = Ended(
        kind(ending, evidence.alive_s or 0.0, policy),
        reading,
        duration_s=evidence.alive_s or 0.0,
        why=reading.sentence if ending.why not in (*REQUESTED, Why.NONE) else "",
    )
    tally, decision = restart.after_end(state.tally, policy.restart, ended, moment.now, moment.jitter)
    state = replace(state, tally=tally, reading=reading, ending=None, pid=None)
    said = orders.Record(
        "exited",
        _said(state.incarnation, reading),
        (
            ("incarnation", state.incarnation),
            ("raw", ending.raw),
            ("cause", ending.why.value if ending.why in SEEN else reading.cause.value),
            ("root", reading.signature.id if reading.signature else None),
            ("requests_lost", swept.requests_lost),
        ),
        level="info" if reading.clean else "error",
    )
    if isinstance(decision, Restart) and not state.leaving:
        state = _count(state, ended, ending, swept.requests_lost)
    return state, decision, [said]


def _said(incarnation: int, reading: ExitReading) -> str:
    """Say of a clean end in one breath which engine it was; what else ends one stands apart, as it was told."""
    if reading.clean:
        return f"engine {incarnation} {reading.sentence.removeprefix('the engine ')}"
    return f"engine {incarnation}: {reading.sentence}"


def _count(state: State, ended: Ended, ending: Ending, lost: int) -> State:
    cause = restart.FAILING if ending.why is Why.FAILING else restart.restart_cause(ended)
    sentence = ended.why or ended.reading.sentence
    return replace(
        state,
        restarts={**state.restarts, cause: state.restarts.get(cause, 0) + 1},
        last_restart=LastRestart(cause, sentence, ending.at, lost),
    )
