"""What we ask an engine over HTTP, against a scripted server."""

import json
import socket

import pytest
import trio
from trio.testing import trio_test

from fakes.scripted_http import Seen, mounted, serving
from vllm_supervisor.adapters import engine_probe
from vllm_supervisor.adapters.engine_probe import Site, capabilities, exchange, probe, ready_check
from vllm_supervisor.core.address import TcpAddress, UnixAddress
from vllm_supervisor.core.probe import PROBE_PATHS, Capabilities, ProbeOutcome, Reach, ReadyCheck

ID = "vsup-probe-1"
LONG = 20.0  # seconds; a limit that only a failing test reaches


@pytest.fixture
def nobody() -> TcpAddress:
    """Give an address where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return TcpAddress("127.0.0.1", held.getsockname()[1])


@trio_test
async def test_an_engine_with_a_first_completion_is_ready() -> None:
    """Health 200 and one completed token make an engine ready, and the token is asked of the model it names."""
    with trio.fail_after(LONG):
        async with serving(mounted("/v1/completions")) as (script, address):
            result = await ready_check(address, request_id=ID)
    assert result.check is ReadyCheck.ANSWERED
    assert result.check.ready
    sent = script.seen[-1]
    assert (sent.method, sent.path, sent.headers["x-request-id"]) == ("POST", "/v1/completions", ID)
    assert json.loads(sent.body) == {"model": "tiny", "prompt": "a", "max_tokens": 1, "temperature": 0}


@trio_test
async def test_nobody_listening_is_refused(nobody: TcpAddress) -> None:
    """A port without a listener and a socket file that is not there are both refusals, not errors."""
    with trio.fail_after(LONG):
        assert (await ready_check(nobody, request_id=ID)).check is ReadyCheck.REFUSED
        assert (await ready_check(UnixAddress("/nowhere/engine.sock"), request_id=ID)).check is ReadyCheck.REFUSED


@pytest.mark.parametrize(
    ("answers", "check"),
    [
        (mounted("/v1/completions", health=(503, "")), ReadyCheck.NOT_HEALTHY),
        (mounted("/v1/completions", health=b""), ReadyCheck.NOT_HEALTHY),
        (mounted("/v1/completions", health=(404, "")), ReadyCheck.ANSWERED),
        (mounted("/v1/completions", work=(500, "")), ReadyCheck.FAILED),
        (mounted("/v1/completions", work=b""), ReadyCheck.FAILED),
        (mounted("/v1/completions", work=(400, "")), ReadyCheck.UNPROVEN),
        (mounted("/v1/completions", work=(401, "")), ReadyCheck.UNPROVEN),
        (mounted("/v1/audio/transcriptions"), ReadyCheck.UNPROVEN),
        (mounted("/v1/embeddings"), ReadyCheck.ANSWERED),
    ],
)
@trio_test
async def test_each_kind_of_not_ready_has_its_own_name(answers: object, check: ReadyCheck) -> None:
    """Not healthy, failed, unproven and answered are told apart, so nobody waits for the wrong thing."""
    with trio.fail_after(LONG):
        async with serving(answers) as (_script, address):  # type: ignore[arg-type]
            result = await ready_check(address, request_id=ID)
    assert result.check is check
    assert result.sentence


@pytest.mark.parametrize("path", PROBE_PATHS)
@trio_test
async def test_the_mounted_endpoint_carries_the_probe(path: str) -> None:
    """A pooling model is probed at its own endpoint: the one whose GET says 405."""
    with trio.fail_after(LONG):
        async with serving(mounted(path)) as (script, address):
            assert await capabilities(address) == Capabilities(path)
            result = await probe(address, request_id=ID)
    assert (result.outcome, result.path) == (ProbeOutcome.ANSWERED, path)
    assert script.count("POST") == 1


@trio_test
async def test_a_wrong_key_means_not_possible() -> None:
    """A 401 ends the search at once, and no work is asked for."""

    def answer(seen: Seen) -> object:
        return (405, "") if seen.headers.get("authorization") == "Bearer right" else (401, "")

    with trio.fail_after(LONG):
        async with serving(answer) as (script, address):
            assert (await probe(address, "wrong", request_id=ID)).outcome is ProbeOutcome.UNAUTHORIZED
            assert script.count("POST") == 0
            assert await capabilities(address, "right") == Capabilities("/v1/completions")


@trio_test
async def test_a_cancelled_probe_takes_its_connection_along() -> None:
    """Withdrawing a probe closes its connection, which is what makes vLLM abort the work."""
    with trio.fail_after(LONG):
        async with serving(mounted("/v1/completions", work=None)) as (script, address):

            async def never(_seen: Seen) -> object:
                await trio.sleep_forever()
                raise AssertionError

            script.answer = never
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: probe(address, request_id=ID, path="/v1/completions", model="tiny"))
                await script.arrived.wait()
                nursery.cancel_scope.cancel()
            await script.left.wait()
    assert script.gone == ["/v1/completions"]


@trio_test
async def test_a_silent_server_is_a_timeout() -> None:
    """A server that accepts and says nothing is neither refused nor broken."""

    async def never(_seen: Seen) -> object:
        await trio.sleep_forever()
        raise AssertionError

    with trio.fail_after(LONG):
        async with serving(never) as (_script, address):
            assert (await exchange(address, "GET", "/metrics", timeout=0.05)).reach is Reach.TIMEOUT


@pytest.mark.parametrize(
    ("raw", "reach", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", Reach.ANSWERED, b"to the end"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", Reach.ANSWERED, b"ab"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", Reach.BROKEN, b""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", Reach.BROKEN, b""),
        (b"HTTP/1.1 200 OK\r\ncontent-le", Reach.BROKEN, b""),
        (b"SSH-2.0-OpenSSH\r\n", Reach.BROKEN, b""),
        (b"", Reach.BROKEN, b""),
    ],
)
@trio_test
async def test_only_a_whole_answer_counts(raw: bytes, reach: Reach, body: bytes) -> None:
    """An answer cut short is broken, whatever its status line said."""
    with trio.fail_after(LONG):
        async with serving(lambda _seen: raw) as (_script, address):
            reply = await exchange(address, "GET", "/metrics")
    assert (reply.reach, reply.body) == (reach, body)


@trio_test
async def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer over the bound ends as broken instead of filling memory."""
    monkeypatch.setattr(engine_probe, "MAX_BODY", 1000)
    with trio.fail_after(LONG):
        async with serving(lambda _seen: (200, "x" * 2000)) as (_script, address):
            assert (await exchange(address, "GET", "/metrics")).reach is Reach.BROKEN


@trio_test
async def test_prefix_host_and_key_stand_in_the_request() -> None:
    """A server behind a path prefix is asked below it, under the name the URL gave."""
    with trio.fail_after(LONG):
        async with serving(lambda _seen: (200, "")) as (script, address):
            await exchange(address, "GET", "/metrics", site=Site("gpu1.example", "/llm", None, "k"))
    seen = script.seen[0]
    assert (seen.path, seen.headers["host"], seen.headers["authorization"]) == (
        "/llm/metrics",
        "gpu1.example",
        "Bearer k",
    )
