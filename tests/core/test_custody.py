"""Which processes are the engine's, decided on pictures of /proc."""

import pytest

from vllm_supervisor.core.custody import Keeper, Kept, Marker, Seen, Us, abandoned, keeper, kept, marked, members
from vllm_supervisor.core.proc import ProcessId, Stat

MAIN = ProcessId(100, 50)
US = Us(pid=10, subreaper=True, spawned=frozenset({100}))


def process(pid: int, ppid: int, *, sid: int | None = None, start: int = 60, mark: bool = False) -> tuple[int, Seen]:
    """One process in a session of its own unless `sid` says otherwise."""
    return pid, Seen(Stat(ProcessId(pid, start), "x", "S", ppid, pid, sid or pid, 1, 0, 0), mark)


def found(*processes: tuple[int, Seen], remembered: tuple[ProcessId, ...] = (), us: Us = US) -> list[int]:
    """Return the pids that are members, in a picture with init, a login shell, us and the main process."""
    picture = dict(
        [
            process(1, 0, start=1),
            process(5, 1, start=2),
            process(10, 5, start=40),
            process(100, 10, start=50),
            *processes,
        ]
    )
    return [one.pid for one in members(MAIN, picture, remembered, us)]


def test_descendants_are_members() -> None:
    """Children and theirs belong, whatever session they made for themselves."""
    assert found(process(101, 100), process(102, 101), process(103, 102)) == [100, 101, 102, 103]


def test_strangers_are_not() -> None:
    """Siblings, ancestors, we ourselves and processes of other parents do not belong."""
    assert found(process(200, 1), process(201, 5), process(202, 200)) == [100]


def test_a_marked_orphan_is_a_member_with_its_children() -> None:
    """The marker finds a process that init adopted, and what that one started."""
    assert found(process(200, 1, mark=True), process(201, 200)) == [100, 200, 201]


def test_a_mark_on_us_or_our_ancestors_means_nothing() -> None:
    """A supervisor that itself runs in a marked environment never counts itself or those above it."""
    picture = dict([process(1, 0), process(5, 1, mark=True), process(10, 5, mark=True), process(100, 10, start=50)])
    assert [one.pid for one in members(MAIN, picture, (), US)] == [100]
    assert [one.pid for one in marked(picture, 10)] == []


def test_the_session_counts_while_the_main_process_holds_it() -> None:
    """A process in the main process's session belongs, also when it is an orphan without the marker."""
    assert found(process(200, 1, sid=100)) == [100, 200]


def test_a_reused_session_number_does_not_count() -> None:
    """Once the main process is gone and its pid leads a stranger's session, that session is not the engine's."""
    picture = dict(
        [process(1, 0, start=1), process(10, 1, start=40), process(100, 1, start=99), process(200, 100, sid=100)]
    )
    assert members(MAIN, picture, (), US) == []


def test_the_session_survives_its_leader_through_a_known_member() -> None:
    """After the main process was reaped a remembered member of its session vouches for the others in it."""
    picture = dict(
        [process(1, 0, start=1), process(10, 1, start=40), process(101, 1, sid=100), process(102, 1, sid=100)]
    )
    assert [one.pid for one in members(MAIN, picture, [ProcessId(101, 60)], US)] == [101, 102]


def test_a_remembered_member_stays_one() -> None:
    """Neither a new parent nor a new session hides a process that was a member once."""
    assert found(process(200, 1), remembered=(ProcessId(200, 60),)) == [100, 200]


def test_a_reused_pid_is_not_remembered() -> None:
    """The same pid with another start time is a stranger."""
    assert found(process(200, 1, start=61), remembered=(ProcessId(200, 60),)) == [100]


def test_adopted_orphans_are_members_of_a_subreaper() -> None:
    """As subreaper, a child we did not spawn can only descend from what we spawned."""
    assert found(process(200, 10)) == [100, 200]
    assert found(process(200, 10), us=Us(10, subreaper=True, spawned=frozenset({100, 200}))) == [100]
    assert found(process(200, 10), us=Us(10, subreaper=False, spawned=frozenset({100}))) == [100]


def test_pid_one_adopts_strangers_without_owning_them() -> None:
    """As PID 1 an orphan without any other tie is a stranger's: reaped, never killed."""
    picture = dict([process(1, 0, start=1), process(100, 1, start=50), process(200, 1)])
    us = Us(1, subreaper=True, spawned=frozenset({100}))
    assert [one.pid for one in members(MAIN, picture, (), us)] == [100]


def test_nothing_older_than_the_main_process_is_a_member() -> None:
    """A child that our parent's shell left us before the engine started is not the engine's."""
    assert found(process(90, 10, start=30)) == [100]


def test_leftovers_are_the_marked_and_their_descendants() -> None:
    """A leftover's unmarked child goes with it; a stranger stays."""
    picture = dict([process(1, 0), process(10, 1), process(200, 1, mark=True), process(201, 200), process(300, 1)])
    assert [one.pid for one in marked(picture, 10)] == [200, 201]


def test_the_marker_is_three_variables() -> None:
    """Instance, run and incarnation go into the environment under names of ours."""
    assert Marker("i", "r", 3).variables() == {"VSUP_INSTANCE": "i", "VSUP_RUN": "r", "VSUP_INCARNATION": "3"}


KEEPER = Keeper(ProcessId(7, 70), "pid:[1],time:[2]")
HERE, AWAY = KEEPER.namespaces, "pid:[9],time:[2]"


@pytest.mark.parametrize(
    ("mark", "here", "lives", "locked", "ours", "fate"),
    [
        (KEEPER, HERE, False, False, True, Kept.NO),
        (KEEPER, HERE, True, False, True, Kept.YES),
        (KEEPER, HERE, None, False, True, Kept.HIDDEN),
        (KEEPER, HERE, None, True, True, Kept.YES),
        (KEEPER, AWAY, None, False, True, Kept.ELSEWHERE),
        (KEEPER, HERE, False, True, True, Kept.YES),
        (KEEPER, HERE, False, False, False, Kept.FOREIGN),
        (KEEPER, HERE, True, True, False, Kept.YES),
        (KEEPER, AWAY, False, False, True, Kept.ELSEWHERE),
        (KEEPER, AWAY, False, True, True, Kept.YES),
        (KEEPER, AWAY, False, False, False, Kept.ELSEWHERE),
        (None, HERE, False, False, True, Kept.UNMARKED),
        (None, HERE, True, True, True, Kept.UNMARKED),
    ],
)
def test_only_a_proven_death_leaves_an_engine_alone(
    *, mark: Keeper | None, here: str, lives: bool, locked: bool, ours: bool, fate: Kept
) -> None:
    """Pid, start time, lock, namespaces and user have to say the same before an engine may be ended."""
    assert kept(mark, here, lives=lives, locked=locked, ours=ours) is fate


@pytest.mark.parametrize(
    "text",
    [None, "", "7", "7 70", "7 70 ", "x 70 pid", "7 -70 pid", "7 70 pid more", "7 ² pid", "9" * 5000 + " 70 pid"],
)
def test_a_mark_that_is_none_is_no_proof(text: str | None) -> None:
    """Whatever is not written as we write it names no supervisor."""
    assert keeper(text) is None


def test_a_supervisor_is_marked_and_read() -> None:
    """What stands in the environment names the same supervisor again."""
    assert keeper(str(KEEPER)) == KEEPER
    assert Marker("i", "r", 1, KEEPER, "/s", "d").variables()["VSUP_SUPERVISOR"] == "7 70 pid:[1],time:[2]"


@pytest.mark.parametrize(
    ("fates", "keepers", "left"),
    [
        ({}, [], []),
        ({20: Kept.NO}, [], [20, 21, 22]),
        ({20: Kept.NO, 21: Kept.NO, 22: Kept.NO}, [], [20, 21, 22]),
        ({20: Kept.YES}, [], []),
        ({20: Kept.ELSEWHERE, 21: Kept.UNMARKED, 22: Kept.FOREIGN}, [], []),
        # a living supervisor, and what is not proven dead, is spared whatever it descends from
        ({20: Kept.NO, 21: Kept.NO, 22: Kept.YES}, [21], [20]),
        ({20: Kept.NO, 21: Kept.YES}, [], [20]),
        # we ourselves and those above us
        ({5: Kept.NO, 10: Kept.NO}, [], []),
    ],
)
def test_what_is_abandoned(fates: dict[int, Kept], keepers: list[int], left: list[int]) -> None:
    """Proven ones with their descendants, and never a living supervisor, its engine or our own line."""
    picture = dict([process(1, 0), process(5, 1), process(10, 5), process(20, 1), process(21, 20), process(22, 21)])
    assert [one.pid for one in abandoned(picture, fates, 10, keepers)] == left
