"""The execution register: whose work an engine request is, and what proves that it has ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.execution import Change, ExecutionRegister, candidates
from vllm_supervisor.core.samples import EventKind, RequestEvent
from vllm_supervisor.core.words import Evidence, ExecutionState

RUNNING, COMPLETED, STOPPED = ExecutionState.RUNNING, ExecutionState.COMPLETED, ExecutionState.CONFIRMED_STOPPED
UNKNOWN = ExecutionState.UNKNOWN


def added(engine_id: str) -> RequestEvent:
    """The scheduler took a request."""
    return RequestEvent("0", 0.0, EventKind.ADDED, engine_id, "", 0)


def finished(engine_id: str, status: str = "FINISHED_ABORTED") -> RequestEvent:
    """The scheduler is done with a request."""
    return RequestEvent("0", 0.0, EventKind.FINISHED, engine_id, status, 1)


def register(*requests: tuple[str, str], **options: int) -> ExecutionRegister:
    """Begin and send requests given as (our id, the id the engine was given)."""
    made = ExecutionRegister(**options)
    for request_id, key in requests:
        made.begin(request_id, 1)
        made.sent(request_id, key, 1)
    return made


@pytest.mark.parametrize(
    ("engine_id", "ours"),
    [
        ("chatcmpl-led-002-81098f07", "led-002"),
        ("chatcmpl-led-002_1-81098f07", "led-002"),
        ("cmpl-led-003-0-ad3c712f", "led-003"),
        ("1_cmpl-led-006-0-ad3c712f", "led-006"),
        ("0_chatcmpl-led-006-ad3c712f", "led-006"),
        ("embd-x-3-ad3c712f", "x"),
        ("classify-x-0-ad3c712f", "x"),
        ("pooling-x-0-ad3c712f", "x"),
        ("generate-tokens-x-ad3c712f", "x"),
        ("generative-scoring-x-2-ad3c712f", "x"),
        ("transcribe-x-ad3c712f", "x"),
        ("chatcmpl-a b/ü-ad3c712f", "a b/ü"),
        ("chatcmpl-plain", "plain"),
        ("resp_0a1b_0-ad3c712f", "resp_0a1b"),
        ("resp_0a1b", "resp_0a1b"),
    ],
)
def test_our_id_is_found_in_the_engine_s(engine_id: str, ours: str) -> None:
    """Each shape that vLLM builds around the id it was given names that id among few candidates."""
    found = candidates(engine_id)
    assert ours in found
    assert len(found) <= 4


@pytest.mark.parametrize("engine_id", ["", "x", "-", "0_", "UPPER-x", "chatcmpl-"])
def test_other_shapes_name_nobody(engine_id: str) -> None:
    """An id of no known shape is nobody's."""
    assert candidates(engine_id) == []


@pytest.mark.parametrize(
    ("statuses", "state"),
    [
        (["FINISHED_ABORTED"], STOPPED),
        (["FINISHED_ERROR"], STOPPED),
        (["FINISHED_STOPPED"], COMPLETED),
        (["FINISHED_LENGTH_CAPPED"], COMPLETED),
        (["FINISHED_REPETITION"], COMPLETED),
        (["FINISHED_STOPPED", "FINISHED_ABORTED"], STOPPED),
        (["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"], COMPLETED),
    ],
)
def test_the_engine_s_word_settles(statuses: list[str], state: ExecutionState) -> None:
    """The scheduler's status decides; one aborted part of several makes the whole stopped, not completed."""
    made = register(("r-1", "key"))
    made.ended("r-1", 5.0)
    names = [f"{number}_cmpl-key-0-0123abcd" for number in range(len(statuses))]
    made.testimony(added(name) for name in names)
    changes = made.testimony(finished(name, status) for name, status in zip(names, statuses, strict=True))
    assert changes == [Change("r-1", state, Evidence.ENGINE_CONFIRMED)]


def test_all_parts_must_have_ended() -> None:
    """While one of several engine requests runs, the execution runs."""
    made = register(("r-1", "key"))
    made.ended("r-1", 5.0)
    made.testimony([added("0_cmpl-key-0-0123abcd"), added("1_cmpl-key-0-0123abcd")])
    assert made.testimony([finished("0_cmpl-key-0-0123abcd")]) == []
    assert made.states[RUNNING] == 1


def test_nothing_is_concluded_before_the_exchange_ends() -> None:
    """The engine may finish first; the exchange with the client still decides when the request is over."""
    made = register(("r-1", "key"))
    assert made.testimony([added("chatcmpl-key-0123abcd"), finished("chatcmpl-key-0123abcd")]) == []
    assert made.ended("r-1", 5.0)[-1] == Change("r-1", STOPPED, Evidence.ENGINE_CONFIRMED)


def test_a_shared_id_is_evidence_for_nobody() -> None:
    """Two open requests with the same client id are settled by counts or the end of the process only."""
    made = register(("r-1", "same"), ("r-2", "same"))
    made.ended("r-1", 5.0)
    assert made.testimony([finished("chatcmpl-same-0123abcd")]) == []
    made.counts(1, 1, 6.0)
    assert made.counts(1, 1, 7.0) == [Change("r-1", STOPPED, Evidence.COUNTS)]


def test_an_ambiguous_tail_is_evidence_for_nobody() -> None:
    """Where an engine id could be either of two open ids, neither is settled by it."""
    made = register(("r-1", "a"), ("r-2", "a-0"))
    made.ended("r-1", 5.0)
    made.ended("r-2", 5.0)
    assert made.testimony([finished("embd-a-0-0123abcd")]) == []
    assert made.states[RUNNING] == 2


def test_a_known_tail_is_not_ambiguous() -> None:
    """Where vLLM always adds a tail, the id with the tail is not meant."""
    made = register(("r-1", "a"), ("r-2", "a-0"))
    made.ended("r-1", 5.0)
    assert made.testimony([finished("cmpl-a-0-0123abcd")]) == [Change("r-1", STOPPED, Evidence.ENGINE_CONFIRMED)]


def test_a_response_is_known_by_the_id_of_its_answer() -> None:
    """What the scheduler said of a response before its id was known counts once it is."""
    made = register(("r-1", "ignored"))
    made.testimony([added("resp_9_0-0123abcd")])
    made.sent("r-1", "resp_9", 1)
    made.told("r-1", RUNNING, Evidence.ANSWER)
    made.ended("r-1", 5.0)
    assert made.background == 1
    assert made.testimony([finished("resp_9_0-0123abcd", "FINISHED_STOPPED")]) == [
        Change("r-1", COMPLETED, Evidence.ENGINE_CONFIRMED)
    ]


def test_lost_testimony_proves_nothing() -> None:
    """After events were missed, what is left of them settles nothing of what was open then."""
    made = register(("r-1", "key"))
    made.testimony_lost()
    made.ended("r-1", 5.0)
    assert made.testimony([finished("chatcmpl-key-0123abcd")]) == []


@pytest.mark.parametrize(
    "readings", [[(0, 6.0)], [(0, 4.0), (0, 6.0)], [(0, 6.0), (1, 7.0), (0, 8.0)], [(0, 6.0), (0, 6.0)]]
)
def test_counts_need_two_agreeing_readings(readings: list[tuple[int, float]]) -> None:
    """One reading, one begun before the end, an interrupted pair or the same reading twice prove nothing."""
    made = register(("r-1", "key"))
    made.ended("r-1", 5.0)
    for reported, began in readings:
        assert made.counts(reported, 0, began) == []


def test_the_end_of_the_processes_settles_its_incarnation_only() -> None:
    """Proof that an incarnation is gone says nothing of a request the next one got."""
    made = register(("r-1", "a"))
    made.begin("r-2", 2)
    made.sent("r-2", "b", 2)
    made.ended("r-1", 5.0)
    made.ended("r-2", 5.0)
    assert made.engine_gone(1) == [Change("r-1", STOPPED, Evidence.PROCESS_GONE)]
    assert made.states[RUNNING] == 1


def test_a_whole_answer_outlives_its_engine() -> None:
    """A request whose exchange is still going on when the engine dies may yet report a whole answer."""
    made = register(("r-1", "a"), ("r-2", "b"))
    assert made.engine_gone(1) == []
    assert made.told("r-1", COMPLETED, Evidence.ANSWER) == [Change("r-1", COMPLETED, Evidence.ANSWER)]
    assert made.ended("r-2", 5.0)[-1] == Change("r-2", STOPPED, Evidence.PROCESS_GONE)


def test_better_evidence_is_not_taken_back() -> None:
    """A final state stays, whatever is told later."""
    made = register(("r-1", "a"))
    made.told("r-1", COMPLETED, Evidence.ANSWER)
    assert made.told("r-1", RUNNING, Evidence.CONNECTION_CLOSED) == []
    assert made.engine_gone(9) == []
    assert made.finish() == []
    assert dict(made.states) == {COMPLETED: 1}


def test_the_register_is_bounded() -> None:
    """Beyond its bound the oldest ended exchange becomes unknown instead of being followed."""
    made = register(*((f"r-{n}", f"k{n}") for n in range(4)), limit=3)
    changes = [change for n in range(4) for change in made.ended(f"r-{n}", 5.0)]
    assert changes[-1] == Change("r-0", UNKNOWN, Evidence.NONE)
    assert len(made.unsettled()) == 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["told", "ended", "add", "finish", "gone", "counts", "lost"]),
            st.integers(0, 3),
            st.sampled_from([RUNNING, COMPLETED, STOPPED, ExecutionState.NOT_STARTED]),
        ),
        max_size=40,
    )
)
def test_every_id_ends_with_exactly_one_state(steps: list[tuple[str, int, ExecutionState]]) -> None:
    """Whatever happens in whatever order, the states count each id once and the end leaves nothing running."""
    made = register(*((f"r-{n}", f"k{n}") for n in range(4)))
    last: dict[str, ExecutionState] = {}
    for now, (what, number, state) in enumerate(steps):
        name, engine_id = f"r-{number}", f"chatcmpl-k{number}-0123abcd"
        if what == "told":
            changes = made.told(name, state, Evidence.ANSWER)
        elif what == "ended":
            changes = made.ended(name, float(now))
        elif what in ("add", "finish"):
            changes = made.testimony([added(engine_id) if what == "add" else finished(engine_id)])
        elif what == "gone":
            changes = made.engine_gone(1)
        elif what == "counts":
            changes = made.counts(0, 0, float(now))
        else:
            made.testimony_lost()
            changes = []
        last |= {change.id: change.state for change in changes}
    last |= {change.id: change.state for change in made.finish()}
    assert sum(made.states.values()) == 4
    assert made.states[RUNNING] == 0
    assert len(last) == 4


def test_what_lingers_is_what_ended_lately_and_is_not_final() -> None:
    """An end counts from its own time on, until the engine has spoken or the time asked for is over."""
    register = ExecutionRegister()
    for name, ended_at in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
        register.begin(name, 1)
        register.sent(name, name, 1)
        register.ended(name, ended_at)
    register.begin("d", 1)  # its exchange goes on
    assert [register.lingering(since) for since in (0.0, 10.0, 25.0, 30.0)] == [3, 2, 1, 0]
    register.engine_gone(1)
    assert register.lingering(0.0) == 0
