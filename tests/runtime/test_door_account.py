"""The front door's own account: whose turn it is, and what shows that the engine works."""

import trio

from fakes.door import Door, FakeJournal, in_trio, open_door
from fakes.raw_engine import STREAM_HEAD, Call, chunk, ok, token
from vllm_supervisor.core.admission import Gate, OpenRequest
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.journal import RequestOutcome
from vllm_supervisor.core.samples import DoorSample
from vllm_supervisor.core.words import ClosedReason, EndedBy, Evidence, ExecutionState, Outcome, RequestClass
from vllm_supervisor.runtime.door_account import DoorAccount

PATH = b"/v1/completions"


def sample(door: Door) -> DoorSample:
    """Read the account of the door's gate."""
    return DoorAccount(FakeJournal(), door.gate, lambda: 0.0, late=lambda: None, ledger_failed=lambda: None).sample()


@in_trio
async def test_the_turn_is_the_engines_with_the_last_byte_of_the_request() -> None:
    """An upload under way is the client's turn; with its last byte the engine's begins, and so does its silence."""
    arrived = trio.Event()

    async def script(call: Call) -> None:
        await call.request()
        arrived.set()
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.send(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 100001\r\n\r\n" % PATH + b" " * 100_000)
        await door.engine.seen()
        while True:
            before = sample(door)
            if not before.at_engine:  # it has taken what there was
                break
            await trio.lowlevel.checkpoint()
        assert (before.in_flight, before.silent_since) == (1, None)
        await client.send(b"}")
        await arrived.wait()
        after = sample(door)
        assert (after.at_engine, after.last_byte_at) == (1, None)
        assert after.silent_since is not None
        await client.close()
        await door.idle()


@in_trio
async def test_a_comment_is_no_work_and_a_token_is() -> None:
    """`: keep-alive` comments reach the client and move nothing; the first token ends the silence."""
    go_on = trio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await call.send(STREAM_HEAD + chunk(b": keep-alive\n\n"))
        await go_on.wait()
        await call.send(token())
        await call.gone()

    async with open_door(script) as door:
        client = await door.client()
        await client.post(PATH)
        await client.until(b": keep-alive\n\n")
        before = sample(door)
        assert (before.at_engine, before.last_byte_at) == (1, None)
        go_on.set()
        await client.until(b"data: ")
        after = sample(door)
        assert after.last_byte_at is not None
        assert after.silent_since == after.last_byte_at
        await client.close()
        await door.idle()


@in_trio
async def test_an_error_is_no_work() -> None:
    """The body of an answer that is no success shows nothing of the engine's work."""
    go_on = trio.Event()

    async def script(call: Call) -> None:
        await call.request()
        head, _, body = ok(b"0123456789").replace(b"200 OK", b"500 Internal Server Error").partition(b"\r\n\r\n")
        await call.send(head + b"\r\n\r\n" + body[:5])
        await go_on.wait()
        await call.send(body[5:])

    async with open_door(script) as door:
        client = await door.client()
        await client.post(PATH)
        await client.until(b"01234")
        assert sample(door).last_byte_at is None
        go_on.set()
        await client.until(b"56789")
        await door.idle()


@in_trio
async def test_a_client_that_takes_nothing_has_the_turn() -> None:
    """Back-pressure is not the engine's silence: while the client does not read, nothing is asked of the engine."""
    event = chunk(b"data: " + b"x" * 60_000 + b"\n\n")

    async def script(call: Call) -> None:
        await call.request()
        await call.send(STREAM_HEAD)
        while True:
            await call.send(event)

    async with open_door(script) as door:
        client = await door.client()
        await client.post(PATH)
        await client.until(b"\r\n\r\n")
        while sample(door).at_engine:  # noqa: ASYNC110 - the kernel's buffers fill without an event
            await trio.sleep(0.002)
        assert (sample(door).in_flight, sample(door).silent_since) == (1, None)
        while not sample(door).at_engine:
            await client.stream.receive_some(1 << 20)
        await client.close()
        await door.idle()


@in_trio
async def test_an_operators_call_is_counted_apart() -> None:
    """A LoRA load is neither work of a user nor progress; it is known to hold the engine's loop."""
    go_on = trio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await go_on.wait()
        await call.send(ok(b"{}"))

    settings = FrontDoorSettings(allow_paths=("/v1/load_lora_adapter",))
    async with open_door(script, settings=settings) as door:
        client = await door.client()
        await client.post(b"/v1/load_lora_adapter")
        await door.engine.seen()
        seen = sample(door)
        assert (seen.in_flight, seen.at_engine, seen.admin_calls) == (1, 0, 1)
        go_on.set()
        await client.answer()
        await door.idle()


@in_trio
async def test_an_operator_can_wake_what_is_asleep() -> None:
    """Admission closed for sleep refuses users and lets the allowed call through that ends it; a stop refuses both."""
    async with open_door(settings=FrontDoorSettings(allow_paths=("/wake_up",))) as door:
        door.gate.close(ClosedReason.ASLEEP)
        client = await door.client()
        await client.post(b"/wake_up")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200")
        await client.post(PATH)
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 503")
        assert b"engine_asleep" in body
        door.gate.close(ClosedReason.STOPPING)
        client = await door.client()
        await client.post(b"/wake_up")
        assert b"draining" in (await client.answer())[1]


@in_trio
async def test_what_is_cheap_asks_nothing_of_the_engine() -> None:
    """A list of models is in flight, and at no engine."""
    go_on = trio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await go_on.wait()
        await call.send(ok(b"{}"))

    async with open_door(script) as door:
        client = await door.client()
        await client.get(b"/v1/models")
        await door.engine.seen()
        assert (sample(door).in_flight, sample(door).at_engine) == (1, 0)
        go_on.set()
        await client.answer()
        await door.idle()


def ended(request: OpenRequest, outcome: Outcome, status: int | None, ended_by: EndedBy) -> RequestOutcome:
    """Build the outcome of a request."""
    return RequestOutcome(
        id=request.id,
        request_class=request.request_class,
        outcome=outcome,
        why="",
        status=status,
        stream=False,
        ended_by=ended_by,
        bytes=0,
        first_byte_s=None,
        duration_s=1.0,
        marker="",
    )


def test_errors_in_a_row() -> None:
    """Errors of the engine count from their first on; a success ends the row, at the time of the engine's last byte."""
    numbers = iter(range(100))
    gate = Gate(limit=10, new_id=lambda: f"led-{next(numbers)}")
    gate.reopen(ClosedReason.STARTING)
    times = [0.0]
    account = DoorAccount(FakeJournal(), gate, lambda: times[0], late=lambda: None, ledger_failed=lambda: None)

    def end(
        outcome: Outcome, status: int | None, by: EndedBy, *, admin: bool = False, last: float | None = None
    ) -> None:
        request = gate.admit(RequestClass.CHAT, times[0])
        assert isinstance(request, OpenRequest)
        request.admin, request.last_byte_at = admin, last
        times[0] += 10.0
        account.ended(ended(request, outcome, status, by), ExecutionState.COMPLETED, Evidence.ANSWER)
        gate.release(request)

    end(Outcome.FAILED, 500, EndedBy.ENGINE)
    end(Outcome.FAILED, None, EndedBy.ENGINE)
    end(Outcome.COMPLETED, 400, EndedBy.ENGINE)
    end(Outcome.CANCELLED, None, EndedBy.CLIENT)
    end(Outcome.FAILED, 500, EndedBy.ENGINE, admin=True)
    end(Outcome.COMPLETED, 200, EndedBy.ENGINE, admin=True)
    seen = account.sample()
    assert (seen.engine_5xx, seen.engine_5xx_since, seen.completions) == (2, 10.0, 0)
    end(Outcome.COMPLETED, 200, EndedBy.ENGINE, last=3.0)
    seen = account.sample()
    assert (seen.engine_5xx, seen.engine_5xx_since, seen.completions) == (0, None, 1)
    assert (seen.last_success_at, seen.last_byte_at) == (3.0, 3.0)
