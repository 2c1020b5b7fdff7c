"""The public address in its other forms: TLS, a Unix socket, several at once."""

import socket
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trustme

from fakes.door import Client, Door, in_trio, open_door
from fakes.raw_engine import LAST_CHUNK, STREAM_HEAD, Call, chunk, event, ok, token
from vllm_supervisor.adapters.tls import Certificates
from vllm_supervisor.core.plan import TlsFiles

AUTHORITY = trustme.CA()


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """Write a certificate for localhost."""
    certificate = AUTHORITY.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    AUTHORITY.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return TlsFiles(
        str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"), str(tmp_path / "ca.pem"), 0, None, refresh=False
    )


async def _secure(door: Door, *, certificate: bool = False) -> Client:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    if certificate:
        AUTHORITY.issue_cert("client").configure_cert(context)
    stream = await trio.open_tcp_stream(*door.address)
    secure = trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)
    return door.keep(Client(secure, stream.socket))


@in_trio
async def test_whole_and_streamed_answers_over_tls(files: TlsFiles):
    """Requests of every size pass over TLS as over plain TCP, on a connection that is kept."""
    big = bytes(range(256)) * 8192

    async def script(call: Call) -> None:
        _, body = await call.request()
        await call.send(ok(body))
        await call.request()
        await call.send(STREAM_HEAD + token(b"a", b'"stop"') + event(b"[DONE]") + LAST_CHUNK)
        await call.request()
        await call.send(STREAM_HEAD + chunk(big) + LAST_CHUNK)
        await call.gone()

    async with open_door(script, tls=Certificates(files).current) as door:
        client = await _secure(door)
        await client.post(b"/v1/embeddings", big)
        assert (await client.answer())[1] == big
        await client.post(b"/v1/completions")
        assert b"[DONE]" in await client.until(LAST_CHUNK)
        await client.post(b"/v1/audio/transcriptions")
        await client.until(b"\r\n\r\n")
        received = b""
        while size := int(await client.until(b"\r\n"), 16):
            received += await client.exactly(size)
            await client.exactly(2)
        await client.exactly(2)
        assert received == big
        await client.stream.aclose()
        await door.idle()
        assert [outcome.outcome for outcome in door.journal.outcomes] == ["completed"] * 3


@in_trio
async def test_client_that_leaves_over_tls_is_noticed(files: TlsFiles):
    """TLS hides nothing: a client that goes closes the engine's connection."""

    async def script(call: Call) -> None:
        await call.request()
        await call.gone()

    async with open_door(script, tls=Certificates(files).current) as door:
        client = await _secure(door)
        await client.post(b"/v1/completions")
        await door.engine.seen()
        await client.stream.aclose()
        await door.idle()
        assert door.journal.outcomes[0].why == "client_left"


@in_trio
async def test_slow_tls_client_gets_every_byte(files: TlsFiles):
    """Back-pressure over TLS: what does not fit waits, in order."""
    size = 16 * 1024 * 1024

    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for number in range(size // 65536):
            await call.send(bytes([number % 256]) * 65536)
        await call.gone()

    async with open_door(script, tls=Certificates(files).current) as door:
        client = await _secure(door)
        await client.post(b"/v1/audio/transcriptions")
        await client.until(b"\r\n\r\n")
        for number in range(size // 65536):
            assert await client.exactly(65536) == bytes([number % 256]) * 65536
        await client.stream.aclose()


@in_trio
async def test_plain_http_on_a_tls_port_is_closed(files: TlsFiles):
    """Bytes that are no TLS end the connection and nothing else."""
    async with open_door(tls=Certificates(files).current) as door:
        client = await door.client()
        await client.get(b"/livez")
        try:
            received = await client.to_end()
        except trio.BrokenResourceError:
            received = client.unread
        assert b"HTTP/1.1 200" not in received
        other = await _secure(door)
        await other.get(b"/livez", b"Connection: close\r\n")
        assert (await other.answer())[0].startswith(b"HTTP/1.1 200")


@in_trio
async def test_required_client_certificate(files: TlsFiles):
    """With `--ssl-cert-reqs 2` only a client with a certificate is served."""
    async with open_door(tls=Certificates(replace(files, cert_reqs=2)).current) as door:
        good = await _secure(door, certificate=True)
        assert (await _ask(good)).startswith(b"HTTP/1.1 200")
        bad = await _secure(door)
        with pytest.raises((trio.BrokenResourceError, EOFError)):
            await _ask(bad)


async def _ask(client: Client) -> bytes:
    await client.get(b"/livez")
    return (await client.answer())[0]


@in_trio
async def test_unix_socket_and_ipv6_beside_tcp(tmp_path: Path):
    """Several listeners of several kinds serve one front door, and a client that leaves each is noticed."""

    async def script(call: Call) -> None:
        while True:
            await call.request()
            if len(door.engine.heads) > 2:
                await call.gone()
            await call.send(ok(b"{}"))

    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "public.sock"))
    six = socket.create_server(("::1", 0), family=socket.AF_INET6)
    with unix, six:
        for listener in (unix, six):
            listener.listen(16)
            listener.setblocking(False)
        async with open_door(script, more_listeners=[unix, six]) as door:
            one = Client(await trio.open_unix_socket(str(tmp_path / "public.sock")))
            two = Client(await trio.open_tcp_stream("::1", six.getsockname()[1]))
            for client in (one, two):
                await client.post(b"/v1/embeddings")
                assert (await client.answer())[1] == b"{}"
            await one.post(b"/v1/embeddings")
            await door.engine.seen(3)
            await one.close()
            await two.close()
            await door.idle()
            assert door.journal.outcomes[-1].why == "client_left"
