"""The one probe, against an engine that answers when the test says so."""

import pytest
import trio
from trio.testing import trio_test

from fakes.scripted_http import Seen, serving
from vllm_supervisor.adapters.engine_probe import probe
from vllm_supervisor.core.probe import PROBE_ID_PREFIX, ProbeOutcome, ProbeResult
from vllm_supervisor.core.samples import ProbeSample
from vllm_supervisor.runtime.prober import Prober


class Engine:
    """Answers each probe with what the test puts into it."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.answer, self.taken = trio.open_memory_channel[ProbeResult](10)
        self.asked = trio.Event()

    async def send(self, request_id: str) -> ProbeResult:
        """Wait for the answer the test gives."""
        self.ids.append(request_id)
        self.asked.set()
        return await self.taken.receive()


@trio_test
async def test_an_answer_is_kept_and_ends_a_row_of_failures() -> None:
    """Failures count in a row with the time of the first; an answer ends the row."""
    engine, times = Engine(), [0.0]
    prober = Prober(engine.send, lambda: times[0])
    with trio.fail_after(5):
        for moment, outcome in [
            (10.0, ProbeOutcome.FAILED),
            (70.0, ProbeOutcome.BROKEN),
            (130.0, ProbeOutcome.ANSWERED),
        ]:
            times[0] = moment
            async with trio.open_nursery() as nursery:
                prober.start(nursery)
                assert prober.sample.sent_at == moment
                await engine.answer.send(ProbeResult(outcome))
            if outcome is ProbeOutcome.BROKEN:
                assert prober.sample == ProbeSample(failed_at=70.0, failures=2, failing_since=10.0)
    assert prober.sample == ProbeSample(answered_at=130.0, failed_at=70.0)
    assert engine.ids == [f"{PROBE_ID_PREFIX}{number}" for number in (1, 2, 3)]


@pytest.mark.parametrize("outcome", [ProbeOutcome.UNAUTHORIZED, ProbeOutcome.NOT_OFFERED])
@trio_test
async def test_a_probe_that_is_not_possible_says_nothing_of_health(outcome: ProbeOutcome) -> None:
    """Without a key or an endpoint there is neither an answer nor a failure, and no further try."""
    engine = Engine()
    prober = Prober(engine.send, lambda: 1.0)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            prober.start(nursery)
            await engine.answer.send(ProbeResult(outcome))
    assert (prober.sample, prober.possible) == (ProbeSample(), False)


@trio_test
async def test_a_withdrawn_probe_leaves_no_trace() -> None:
    """A probe taken back, before or after its first byte, is neither answered nor failed, and another may follow."""
    engine = Engine()
    prober = Prober(engine.send, lambda: 1.0)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            prober.start(nursery)
            prober.withdraw()
            assert (prober.probing, prober.sample) == (False, ProbeSample())
            prober.start(nursery)
            await engine.asked.wait()
            prober.withdraw()
        assert prober.sample == ProbeSample()
        prober.withdraw()
    assert engine.ids == [f"{PROBE_ID_PREFIX}2"]


@trio_test
async def test_a_second_probe_is_a_fault() -> None:
    """With a probe in flight, sending another one is refused loudly."""
    engine = Engine()
    prober = Prober(engine.send, lambda: 1.0)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            prober.start(nursery)
            with pytest.raises(RuntimeError):
                prober.start(nursery)
            prober.withdraw()


@trio_test
async def test_withdrawing_closes_the_connection() -> None:
    """The engine sees the probe's client leave, which makes vLLM abort its work."""

    async def never(_seen: Seen) -> object:
        await trio.sleep_forever()
        raise AssertionError

    with trio.fail_after(10):
        async with serving(never) as (script, address), trio.open_nursery() as nursery:
            prober = Prober(
                lambda request_id: probe(address, request_id=request_id, path="/v1/completions", model="tiny"),
                trio.current_time,
            )
            prober.start(nursery)
            await script.arrived.wait()
            prober.withdraw()
            await script.left.wait()
