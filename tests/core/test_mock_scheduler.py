"""The stand-in engine's scheduler: queueing, chunked prefill, what is counted when."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.mock.scheduler import Core, Sequence
from vllm_supervisor.mock.stats import Gauges, Stats, token_buckets


def core(seqs: int = 2, tokens: int = 8) -> Core:
    """Make a scheduler with few slots."""
    return Core(0, seqs, tokens, Stats(2048))


def sequence(prompt: int = 1, limit: int = 3, stop: int | None = None) -> Sequence:
    """Make a request of one choice."""
    return Sequence(0, prompt, limit, stop, 0.0)


def step(target: Core, now: float = 1.0) -> list[Sequence]:
    """One whole step."""
    return target.end(target.begin(now), now)


def test_requests_beyond_the_slots_wait_in_order() -> None:
    """max_num_seqs run, the next waits and moves up when one ends; the gauges say so."""
    target = core(seqs=2)
    first, second, third = sequence(limit=1), sequence(limit=2), sequence()
    for item in (first, second, third):
        target.add(item)
    assert step(target) == [first, second]
    assert first.finish == "length"
    assert target.stats.gauges == Gauges(1, 1, target.stats.gauges.kv_usage)
    assert step(target) == [second, third]


def test_a_long_prompt_takes_steps_that_are_not_counted() -> None:
    """Three chunks of a prompt make one counted iteration and one token, and KV usage grows meanwhile."""
    target = core(tokens=8)
    target.add(sequence(prompt=20))
    usage = []
    for _ in range(3):
        step(target)
        usage.append(target.stats.gauges.kv_usage)
    assert usage == sorted(set(usage))
    assert sum(target.stats.histograms["vllm:iteration_tokens_total"].counts) == 1
    assert (target.stats.prompt_tokens, target.stats.generation_tokens) == (20, 1)


def test_ends_carry_the_right_reason() -> None:
    """A natural stop before the limit is `stop`, the limit is `length`; both count as finished requests."""
    target = core()
    stops, runs = sequence(limit=9, stop=2), sequence(limit=2)
    target.add(stops)
    target.add(runs)
    step(target)
    step(target)
    assert (stops.finish, runs.finish) == ("stop", "length")
    assert (target.stats.finished["stop"], target.stats.finished["length"]) == (1, 1)


def test_an_abort_during_a_step_gives_no_token_and_no_finished_request() -> None:
    """What was aborted between begin and end is left out of the end; the gauges keep their values until then."""
    target = core()
    gone = sequence()
    target.add(gone)
    step(target)
    batch = target.begin(2.0)
    target.abort(gone)
    assert target.stats.gauges.running == 1
    assert target.end(batch, 2.0) == []
    assert (target.stats.gauges.running, sum(target.stats.finished.values())) == (0, 0)


def test_frozen_gauges_keep_their_values() -> None:
    """With frozen gauges an end of all work is not shown."""
    target = core()
    target.add(sequence(limit=2))
    step(target)
    target.frozen = True
    step(target)
    assert not target.busy
    assert target.stats.gauges.running == 1


def test_nobody_is_admitted_while_scheduling_hangs() -> None:
    """Without admission a waiting request stays, and there is nothing to do."""
    target = core()
    target.add(sequence())
    assert target.begin(1.0, admit=False).work == []
    target.refresh()
    assert (target.stats.gauges.running, target.stats.gauges.waiting) == (0, 1)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), max_size=12),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_every_request_gets_exactly_its_tokens(requests: list[tuple[int, int]], seqs: int, tokens: int) -> None:
    """Whatever the slots and the budget, each request ends with as many tokens as it asked for and nothing is left."""
    target = core(seqs, tokens)
    items = [sequence(prompt, limit) for prompt, limit in requests]
    for item in items:
        target.add(item)
    while target.busy:
        step(target)
        assert len(target.running) <= seqs
    assert [item.made for item in items] == [limit for _, limit in requests]
    assert target.stats.generation_tokens == sum(limit for _, limit in requests)


def test_token_buckets_follow_the_model_length() -> None:
    """Buckets are 1, 2, 5 times powers of ten up to the length."""
    assert token_buckets(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
