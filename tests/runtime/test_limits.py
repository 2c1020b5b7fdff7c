"""Every limit and time-out of the front door, and what each tells the client and the ledger."""

import json

import pytest
import trio
import trio.testing

from fakes.door import Client, in_trio, open_door
from fakes.raw_engine import STREAM_HEAD, Call, chunk, ok, token
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.words import ClosedReason
from vllm_supervisor.runtime import front_door
from vllm_supervisor.runtime.connection import Connection

SHORT = 0.15


async def _hang(call: Call) -> None:
    await call.head()
    await call.gone()


@in_trio
async def test_slow_head_is_given_up():
    """A head that does not arrive in time is answered 408 and closed, however it trickles."""
    async with open_door(settings=FrontDoorSettings(head_timeout=SHORT)) as door:
        client = await door.client()
        await client.send(b"GET /livez HTTP/1.1\r\n")
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 408 ")
        client.half_close()
        assert await client.to_end() == b""


@in_trio
async def test_an_internal_error_closes_one_connection_and_no_other():
    """Whether at its accept or at a look at its time limits: it is logged, and the next client is served."""
    async with open_door(settings=FrontDoorSettings(idle_timeout=SHORT), faults=True) as door:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(front_door, "Link", _broken)
            assert await (await door.client()).to_end() == b""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connection, "tick", _broken)
            assert await (await door.client()).to_end() == b""
        client = await door.client()
        await client.get(b"/livez")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200 ")
        assert [line["log_level"] for line in door.log] == ["error", "error"]


def _broken(*_: object, **__: object) -> None:
    raise KeyError("broken")


@in_trio
async def test_idle_connection_is_closed_without_a_word():
    """A connection that asks nothing is closed after the idle time, before and after a request."""
    async with open_door(settings=FrontDoorSettings(idle_timeout=SHORT)) as door:
        fresh, used = await door.client(), await door.client()
        await used.get(b"/livez")
        await used.answer()
        assert await fresh.to_end() == b""
        assert await used.to_end() == b""


HALF_A_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\nhalf"
TOO_SLOW = [
    pytest.param(FrontDoorSettings(body_timeout=SHORT), id="pause"),
    pytest.param(FrontDoorSettings(body_deadline=SHORT), id="rate"),
]


@pytest.mark.parametrize("settings", TOO_SLOW)
@in_trio
async def test_slow_body_is_turned_away(settings: FrontDoorSettings):
    """A body that stops coming, or trickles: 408; it was never admitted, and the engine saw nothing of it."""
    async with open_door(_hang, settings=settings) as door:
        client = await door.client()
        await client.send(HALF_A_BODY)

        async def trickle() -> None:
            while settings.body_deadline == SHORT:
                await client.send(b"x")
                await trio.sleep(SHORT / 10)

        door.nursery.start_soon(trickle)
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 408 ")
        assert door.journal.rejections == [("completions", "body_too_slow")]
        assert not door.journal.story
        assert not door.engine.calls


@pytest.mark.parametrize("settings", TOO_SLOW)
@in_trio
async def test_slow_body_ends_its_request(settings: FrontDoorSettings):
    """A large body that begins well and then stops: 408, the engine's connection closed, the place given back."""
    async with open_door(_hang, settings=settings) as door:
        client = await door.client()
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500000\r\n\r\n" + b"x" * 100_000
        )
        await door.engine.seen()
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 408 ")
        await door.idle()
        assert door.journal.story == [("cancelled", "body_too_slow", "supervisor", "running", "connection_closed")]


@in_trio
async def test_body_that_has_not_come_holds_no_place():
    """With a limit of one, a slow body keeps nobody out and no drain waiting; it takes its place once it is whole."""
    async with open_door(limit=1) as door:
        slow, other = await door.client(), await door.client()
        await slow.send(HALF_A_BODY)
        for _ in range(3):
            await other.post(b"/v1/completions")
            assert (await other.answer())[0].startswith(b"HTTP/1.1 200 ")
            await door.idle()
        assert door.gate.counts.accepted == 3
        await slow.send(b"x" * 46)
        assert (await slow.answer())[0].startswith(b"HTTP/1.1 200 ")
        assert door.gate.counts.accepted == 4


@in_trio
async def test_body_that_comes_when_all_places_are_taken_is_refused():
    """A request that could have been admitted when it began is refused if it cannot be when its body is there."""
    async with open_door(_hang, limit=1) as door:
        slow, other = await door.client(), await door.client()
        await slow.send(HALF_A_BODY)
        await trio.testing.wait_all_tasks_blocked()
        await other.post(b"/v1/completions")
        await door.engine.seen()
        await slow.send(b"x" * 46)
        assert (await slow.answer())[0].startswith(b"HTTP/1.1 429 ")
        assert door.journal.rejections == [("completions", "saturated")]


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/models"])
@in_trio
async def test_body_under_way_is_refused_when_admission_closes(path: bytes):
    """A stop answers those at once whose body is still coming."""
    async with open_door() as door:
        client = await door.client()
        await client.send(HALF_A_BODY.replace(b"/v1/completions", path))
        while not door.front.connections:
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        door.gate.close(ClosedReason.STOPPING)
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["code"] == "draining"
        assert not door.engine.calls


@in_trio
async def test_client_that_leaves_before_its_body_is_there_stands_in_no_ledger():
    """It was not admitted, so there is nothing to account for."""
    async with open_door() as door:
        client = await door.client()
        await client.send(HALF_A_BODY)
        await trio.testing.wait_all_tasks_blocked()
        await client.close()
        while door.front.connections:
            await trio.lowlevel.checkpoint()
        assert not door.journal.entered
        assert not door.journal.rejections


@in_trio
async def test_slow_bodies_make_room_at_the_limit_of_connections():
    """With every connection waiting for a body, a newcomer takes the place of the oldest."""
    async with open_door(settings=FrontDoorSettings(max_connections=3)) as door:
        slow = [await door.client() for _ in range(3)]
        for client in slow:
            await client.send(HALF_A_BODY)
            await trio.testing.wait_all_tasks_blocked()
        newcomer = await door.client()
        await newcomer.post(b"/v1/completions")
        assert (await newcomer.answer())[0].startswith(b"HTTP/1.1 200 ")
        assert (await slow[0].answer())[0].startswith(b"HTTP/1.1 503 ")
        await slow[1].send(b"x" * 46)
        assert (await slow[1].answer())[0].startswith(b"HTTP/1.1 200 ")


@in_trio
async def test_body_that_waits_for_the_engine_is_not_slow():
    """A client that cannot send because the engine does not read is not blamed for it."""
    go = trio.Event()

    async def script(call: Call) -> None:
        await call.head()
        await go.wait()
        await call.read(8_000_000)
        await call.send(ok(b"{}"))

    async with open_door(script, settings=FrontDoorSettings(body_timeout=SHORT, body_deadline=2 * SHORT)) as door:
        client = await door.client()

        async def upload() -> None:
            await client.send(b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 8000000\r\n\r\n")
            await client.send(b"x" * 8_000_000)

        door.nursery.start_soon(upload)
        await door.engine.seen()
        with trio.move_on_after(3 * SHORT):
            await client.answer()
        go.set()
        assert (await client.answer())[1] == b"{}"


@in_trio
async def test_chunked_body_beyond_the_limit_is_refused():
    """A body without a length is counted; beyond the limit: 413, and the engine's connection is closed."""
    async with open_door(_hang, settings=FrontDoorSettings(max_body=10)) as door:
        client = await door.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        await client.send(chunk(b"x" * 6) + chunk(b"x" * 6))
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 413 ")
        assert door.journal.rejections == [("completions", "body_too_large")]
        assert not door.engine.calls


@in_trio
async def test_chunked_body_that_grows_beyond_the_limit_ends_its_request():
    """Beyond the limit after it was admitted: 413, and the engine's connection is closed."""
    async with open_door(_hang, settings=FrontDoorSettings(max_body=200_000)) as door:
        client = await door.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        await client.send(chunk(b"x" * 100_000))
        await door.engine.seen()
        await client.send(chunk(b"x" * 100_001))
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 413 ")
        await door.idle()
        assert door.journal.outcomes[0].why == "body_too_large"


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
@in_trio
async def test_large_head_is_refused(end: bytes):
    """A head beyond the limit is answered 431, whether or not it ever ends."""
    async with open_door(settings=FrontDoorSettings(max_head=2000)) as door:
        client = await door.client()
        await client.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2000 + end)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 431 ")
        assert door.engine.calls == 0


@in_trio
async def test_client_that_takes_nothing_is_given_up():
    """A client that does not read its answer is cut after the stall time, and the engine is freed."""
    freed = trio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await call.send(STREAM_HEAD)
        try:
            while True:
                await call.send(token(b"x" * 60000))
        finally:
            freed.set()

    async with open_door(script, settings=FrontDoorSettings(client_stall_timeout=SHORT)) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        await freed.wait()
        await door.idle()
        assert door.journal.story == [("cancelled", "client_stalled", "supervisor", "running", "connection_closed")]


@pytest.mark.parametrize("stream", [False, True])
@in_trio
async def test_deadline_of_the_caller(stream: bool):
    """A request beyond its deadline ends as cancelled: 504, or an error event in a stream."""

    async def script(call: Call) -> None:
        await call.request()
        if stream:
            await call.send(STREAM_HEAD + token())
        await call.gone()

    async with open_door(script, settings=FrontDoorSettings(request_deadline=SHORT)) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        answer = await client.to_end()
        assert b'"code": "deadline"' in answer
        assert answer.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 504 ")
        await door.idle()
        assert door.journal.story == [("cancelled", "deadline", "supervisor", "running", "connection_closed")]


@in_trio
async def test_held_request_goes_when_admission_opens():
    """With `hold` a request waits for a starting engine and is then admitted like any other."""
    async with open_door(up=False, settings=FrontDoorSettings(hold=10)) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        await _quiet(client)
        door.upstreams.point_at(UnixAddress(door.engine.path), 5)
        door.gate.reopen(ClosedReason.STARTING)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200 ")
        assert door.gate.counts.accepted == 1


@in_trio
async def test_held_request_is_refused_in_the_end_or_when_the_reason_changes():
    """Holding ends: after its time, and at once when waiting has no point any more."""
    async with open_door(up=False, settings=FrontDoorSettings(hold=SHORT)) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        _, body = await client.answer()
        assert json.loads(body)["error"]["code"] == "engine_starting"
        assert door.journal.rejections == [("completions", "engine_starting")]


@in_trio
async def test_held_request_keeps_the_body_that_comes_meanwhile():
    """What a held client sends of its body goes to the engine with the rest, and a next request is its own."""
    bodies: list[bytes] = []

    async def script(call: Call) -> None:
        bodies.append((await call.request())[1])
        await call.send(ok(b"{}"))
        await call.gone()

    async with open_door(script, up=False, settings=FrontDoorSettings(hold=10)) as door:
        client = await door.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 15\r\n\r\n{")
        await _quiet(client)
        await client.send(b'"prompt":"hi"}')
        await _quiet(client)
        door.upstreams.point_at(UnixAddress(door.engine.path), 5)
        door.gate.reopen(ClosedReason.STARTING)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200 ")
        assert bodies == [b'{"prompt":"hi"}']
        await client.get(b"/livez")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("expects", [False, True])
@in_trio
async def test_held_request_is_asked_for_its_body_when_admission_opens(expects: bool):
    """While it is held its body is not waited for by the clock, nor asked for; afterwards it is."""
    settings = FrontDoorSettings(hold=10, body_timeout=SHORT, body_deadline=SHORT)
    async with open_door(up=False, settings=settings) as door:
        client = await door.client()
        fields = b"Expect: 100-continue\r\n" if expects else b""
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n%bContent-Length: 2\r\n\r\n" % fields)
        with trio.move_on_after(3 * SHORT) as moment:
            await client.answer()
        assert moment.cancelled_caught
        door.upstreams.point_at(UnixAddress(door.engine.path), 5)
        door.gate.reopen(ClosedReason.STARTING)
        if expects:
            assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"{}")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 200 ")


@in_trio
async def test_held_request_whose_body_is_broken_is_turned_away():
    """What is wrong with the body ends the holding at once."""
    async with open_door(up=False, settings=FrontDoorSettings(hold=600)) as door:
        client = await door.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        await _quiet(client)
        await client.send(b"x\r\n")
        assert (await client.answer())[0].startswith(b"HTTP/1.1 400 ")
        door.gate.reopen(ClosedReason.STARTING)
        await trio.testing.wait_all_tasks_blocked()
        assert door.journal.rejections == [("completions", "bad_request")]
        assert not door.gate.counts.accepted


@pytest.mark.parametrize(
    ("reason", "code"), [(ClosedReason.STOPPING, "draining"), (ClosedReason.PARKED, "engine_parked")]
)
@in_trio
async def test_held_request_is_refused_at_once_when_there_is_nothing_to_wait_for(reason: ClosedReason, code: str):
    """A stop or a park that comes while requests are held is told to them at once, as to those that come later."""
    async with open_door(up=False, settings=FrontDoorSettings(hold=600)) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        await _quiet(client)
        door.gate.close(reason)
        _, body = await client.answer()
        assert json.loads(body)["error"]["code"] == code
        assert door.journal.rejections == [("completions", code)]


@in_trio
async def test_held_request_leaves_with_its_client():
    """A client that goes while it is held takes no place."""
    async with open_door(up=False, settings=FrontDoorSettings(hold=10)) as door:
        client = await door.client()
        await client.post(b"/v1/completions")
        with trio.move_on_after(0.05):
            await client.answer()
        await client.close()
        while door.front.connections:
            await trio.lowlevel.checkpoint()
        door.gate.reopen(ClosedReason.STARTING)
        assert door.gate.counts.accepted == 0


@in_trio
async def test_at_the_limit_the_longest_waiting_connection_makes_room():
    """Beyond the limit of connections the oldest one without a request is closed; the newest is served."""
    async with open_door(settings=FrontDoorSettings(max_connections=3)) as door:
        oldest, second, third = [await _alive(await door.client()) for _ in range(3)]
        await second.send(b"GET /livez HTTP/1.1\r\nHost: a\r\n")
        newest = await _alive(await door.client())
        assert await oldest.to_end() == b""
        for client in (third, newest):
            await _alive(client)


@in_trio
async def test_busy_connections_are_never_evicted_and_health_still_answers():
    """With every connection busy, one more is served health paths and reads 503 for anything else."""
    async with open_door(_hang, settings=FrontDoorSettings(max_connections=2)) as door:
        busy = [await door.client() for _ in range(2)]
        for client in busy:
            await client.post(b"/v1/completions")
        await door.engine.seen(2)
        extra = await door.client()
        await _alive(extra, fields=b"Connection: close\r\n")
        another = await door.client()
        await another.post(b"/v1/completions")
        head, body = await another.answer()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in head
        assert json.loads(body)["error"]["code"] == "saturated"
        assert door.journal.rejections == [("completions", "saturated")]
        assert door.gate.in_flight == 2


@in_trio
async def test_nobody_is_turned_away_without_a_word():
    """Evicted before a first answer, or served beyond the limit, a client reads 503; the key is logged once."""
    async with open_door(_hang, settings=FrontDoorSettings(max_connections=2)) as door:
        for _ in range(2):
            await (await door.client()).post(b"/v1/completions")
        await door.engine.seen(2)
        clients = [await door.client() for _ in range(3)]  # each takes the place of the one before
        await clients[-1].post(b"/v1/completions")
        for client in clients:
            head, body = await client.answer()
            assert head.startswith(b"HTTP/1.1 503 ")
            assert json.loads(body)["error"]["code"] == "saturated"
        assert door.gate.counts.accepted == 2
        assert [line["event"].partition(";")[0] for line in door.log if line["log_level"] == "warning"] == [
            "refused a client: front_door.max_connections = 2 is reached"
        ]


@in_trio
async def test_clients_beyond_everything_read_why():
    """With the reserve busy as well, a client is refused before it has sent anything, and its connection ends in order."""
    async with open_door(_hang, settings=FrontDoorSettings(max_connections=1)) as door:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(front_door, "_HEALTH_RESERVE", 0)
            await (await door.client()).post(b"/v1/completions")
            await door.engine.seen()
            for _ in range(70):
                client = await door.client()
                head, body = await client.answer()
                assert head.startswith(b"HTTP/1.1 503 ")
                assert json.loads(body)["error"]["code"] == "saturated"
                assert await client.to_end() == b""


@in_trio
async def test_health_answers_at_once_under_an_attack_of_slow_heads():
    """Hundreds of connections that never finish their heads do not slow a health path down."""
    async with open_door(settings=FrontDoorSettings(max_connections=100)) as door:
        for _ in range(300):
            slow = await door.client()
            await slow.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: ")
        for _ in range(20):
            with trio.fail_after(0.5):
                await _alive(await door.client())


async def _quiet(client: Client) -> None:
    """See that nothing is answered for a moment."""
    with trio.move_on_after(0.05) as moment:
        await client.answer()
    assert moment.cancelled_caught


async def _alive(client: Client, fields: bytes = b"") -> Client:
    await client.get(b"/livez", fields)
    assert (await client.answer())[0].startswith(b"HTTP/1.1 200 ")
    return client


@in_trio
async def test_kubelet_on_health_is_told_once_what_to_do():
    """A kubelet's probe that reads 503 on /health logs the mend, and only the first time."""
    async with open_door(up=False) as door:
        client = await door.client()
        for _ in range(2):
            await client.get(b"/health", b"User-Agent: kube-probe/1.30\r\n")
            assert (await client.answer())[0].startswith(b"HTTP/1.1 503 ")
        assert sum("kubelet" in entry["event"] for entry in door.log) == 1


@in_trio
async def test_the_first_refusal_for_the_limit_is_logged_with_its_key():
    """A full house names the key that set its size, once a minute, whatever the crowd before the door."""
    async with open_door(limit=0) as door:
        for _ in range(3):
            client = await door.client()
            await client.post(b"/v1/completions")
            head, _ = await client.answer()
            assert head.split()[1] == b"429"
        warnings = [entry["event"] for entry in door.log if entry["log_level"] == "warning"]
        assert warnings == [
            "refused a client: front_door.max_in_flight = 0 is reached; raise it if the engine can take more"
        ]
