"""What counts as progress of a load, sign by sign."""

import pytest

from vllm_supervisor.core.load_activity import CPU_RATE, IO_RATE, MEMORY_STEP, VARIANTS, LoadActivity, Sign, Usage
from vllm_supervisor.core.proc import ProcessId

MAIN, CORE = ProcessId(10, 1), ProcessId(11, 2)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("lines", "new"),
    [
        (["loading weights"], [True]),
        (["loading weights", "loading weights"], [True, False]),
        (["loading weights", "", "   ", "\x1b[0m"], [True, False, False, False]),
        # every format of a stamp before the same words
        (["INFO 11-29 21:14:50 [a.py:1] waits", "INFO 11-29 21:15:50 [a.py:1] waits"], [True, False]),
        (["2026-01-02T03:04:05.678Z INFO waits", "2026-01-02T03:05:05Z INFO waits"], [True, False]),
        (["[2026-01-02 03:04:05 TP0] waits", "[2026-01-02 03:05:05 TP0] waits"], [True, False]),
        (
            ['{"ts": "2026-01-02T03:04:05Z", "level": "info", "msg": "waits"}', '{"ts": 1767323106.1, "msg": "waits"}'],
            [True, False],
        ),
        (["1767323106.123 waits", "1767323107.123 waits"], [True, False]),
        # other words, levels and numbers
        (["WARNING 11-29 21:14:50 [a.py:1] no kernel", "ERROR 11-29 21:14:50 [a.py:1] no file"], [True, True]),
        (["layer 1/80", "layer 2/80", "layer 2/80"], [True, True, False]),
        (["llama_model_loader: 3.1 GiB", "llama_model_loader: 3.2 GiB"], [True, True]),
    ],
)
def test_a_line_counts_when_its_text_is_new(lines: list[str], new: list[bool]) -> None:
    """Words count once, whatever stamp or format stands before them; another number makes another line."""
    activity = LoadActivity()
    assert [activity.line(line) for line in lines] == new


def test_a_heartbeat_ends_some_day() -> None:
    """Lines that differ in their numbers alone count a bounded number of times, whatever else comes between them."""
    activity = LoadActivity()
    counted = sum(activity.line(f"still waiting for the other rank ({second} s)") for second in range(10 * VARIANTS))
    assert counted == VARIANTS
    assert activity.line("loaded the weights")
    assert not activity.line("still waiting for the other rank (7 s)")


def use(cpu: float = 0.0, rss: int = 0, io: int | None = 0) -> Usage:
    """Give what one process has used."""
    return Usage(cpu, rss, io)


@pytest.mark.parametrize(
    ("first", "second", "output", "sign"),
    [
        ({MAIN: use()}, {MAIN: use()}, 0, None),
        ({MAIN: use()}, {MAIN: use(io=IO_RATE)}, 0, Sign.IO),
        ({MAIN: use()}, {MAIN: use(io=IO_RATE - 1)}, 0, None),
        ({MAIN: use(), CORE: use()}, {MAIN: use(io=IO_RATE // 2), CORE: use(io=IO_RATE // 2)}, 0, Sign.IO),
        # what it prints is in its lines: a flood of one line is no I/O
        ({MAIN: use()}, {MAIN: use(io=2 * IO_RATE)}, 2 * IO_RATE, None),
        ({MAIN: use(io=None)}, {MAIN: use(io=None)}, 0, None),
        ({MAIN: use(io=None)}, {MAIN: use(io=9 * IO_RATE)}, 0, None),
        ({MAIN: use(rss=MIB)}, {MAIN: use(rss=MEMORY_STEP)}, 0, None),
        ({MAIN: use(rss=MEMORY_STEP)}, {MAIN: use(rss=2 * MEMORY_STEP)}, 0, Sign.MEMORY),
        ({MAIN: use(rss=4 * MEMORY_STEP)}, {MAIN: use(rss=2 * MEMORY_STEP)}, 0, None),
        ({MAIN: use()}, {MAIN: use(cpu=CPU_RATE)}, 0, Sign.CPU),
        ({MAIN: use()}, {MAIN: use(cpu=CPU_RATE - 0.01)}, 0, None),
        ({MAIN: use()}, {MAIN: use(cpu=1.0, io=IO_RATE)}, 0, Sign.IO),
        # a process that came, went or was replaced tells nothing by its totals
        ({MAIN: use()}, {MAIN: use(), CORE: use(cpu=9.0, io=9 * IO_RATE)}, 0, None),
        ({MAIN: use(), CORE: use(cpu=9.0, io=IO_RATE)}, {MAIN: use()}, 0, None),
        ({CORE: use(cpu=9.0)}, {ProcessId(CORE.pid, 99): use(cpu=99.0, io=9 * IO_RATE)}, 0, None),
        ({}, {}, 0, None),
    ],
)
def test_the_tree_shows_what_it_does(
    first: dict[ProcessId, Usage], second: dict[ProcessId, Usage], output: int, sign: Sign | None
) -> None:
    """I/O above its rate, a new maximum of memory and CPU time are signs, in that order; less is none."""
    activity = LoadActivity()
    activity.look(first, 0, 100.0)
    assert activity.look(second, output, 101.0) is sign


def test_memory_has_to_reach_a_new_maximum() -> None:
    """Memory that is given back and taken again is no progress."""
    activity = LoadActivity()
    sizes = [2, 4, 1, 4, 3, 6]
    signs = [activity.look({MAIN: use(rss=size * MEMORY_STEP)}, 0, float(at)) for at, size in enumerate(sizes)]
    assert signs == [None, Sign.MEMORY, None, None, None, Sign.MEMORY]


def test_slow_growth_adds_up() -> None:
    """Memory that grows by less than a step a look counts once a step is full."""
    activity = LoadActivity()
    signs = [activity.look({MAIN: use(rss=at * MEMORY_STEP // 4)}, 0, float(at)) for at in range(9)]
    assert [at for at, sign in enumerate(signs) if sign is Sign.MEMORY] == [4, 8]
