"""Requests that two servers could read differently: each is answered with an error and a close, and goes no further."""

import pytest
import trio

from fakes.door import in_trio, open_door
from fakes.raw_engine import Call, ok

_LINE = b"POST /v1/completions HTTP/1.1\r\n"
_HEAD = _LINE + b"Host: a\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

MALFORMED = {
    "length and chunked": _HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": _HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": _HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "same length twice": _HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "length list": _HEAD + b"Content-Length: 5, 6\r\n\r\nhello!",
    "signed length": _HEAD + b"Content-Length: +5\r\n\r\nhello",
    "negative length": _HEAD + b"Content-Length: -5\r\n\r\nhello",
    "hexadecimal length": _HEAD + b"Content-Length: 0x5\r\n\r\nhello",
    "length with underscore": _HEAD + b"Content-Length: 1_0\r\n\r\nhello",
    "empty length": _HEAD + b"Content-Length:\r\n\r\nhello",
    "length beyond numbers": _HEAD + b"Content-Length: 99999999999999999999999999\r\n\r\nhello",
    "unicode length": _HEAD + b"Content-Length: \xd9\xa5\r\n\r\nhello",
    "space before colon": _HEAD + b"Content-Length : 5\r\n\r\nhello",
    "space before name": _HEAD + b" Content-Length: 5\r\n\r\nhello",
    "folded length": _HEAD + b"Content-Length:\r\n 5\r\n\r\nhello",
    "folded chunked": _HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "tab folded": _HEAD + b"X: a\r\n\tb\r\n\r\n",
    "identity": _HEAD + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "gzip, chunked": _HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": _HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked, identity": _HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "xchunked": _HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "quoted chunked": _HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "vertical tab chunked": _HEAD + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "no-break space chunked": _HEAD + b"Transfer-Encoding:\xa0chunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare LF heads": b"POST /v1/completions HTTP/1.1\nHost: a\nContent-Length: 0\n\n",
    "bare LF in a field": _HEAD + b"X: a\nContent-Length: 5\r\n\r\nhello",
    "bare CR in a field": _HEAD + b"X: a\rContent-Length: 5\r\n\r\n",
    "LF CR": _HEAD + b"X: a\n\r\r\n\r\n",
    "NUL in a value": _HEAD + b"X: a\x00b\r\n\r\n",
    "NUL in a name": _HEAD + b"X\x00: a\r\n\r\n",
    "control in a name": _HEAD + b"X\x01Y: a\r\n\r\n",
    "no name": _HEAD + b": a\r\n\r\n",
    "no colon": _HEAD + b"abc\r\n\r\n",
    "high byte in a name": _HEAD + b"X\xff: a\r\n\r\n",
    "no Host": _LINE + b"\r\n",
    "two Hosts": _HEAD + b"Host: b\r\n\r\n",
    "Host with a path": _LINE + b"Host: a/b\r\n\r\n",
    "Host with user": _LINE + b"Host: user@a\r\n\r\n",
    "absolute form": b"GET http://a/v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "authority form": b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "asterisk form": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "fragment": b"GET /v1/models#x HTTP/1.1\r\nHost: a\r\n\r\n",
    "space in target": b"GET /v1/models x HTTP/1.1\r\nHost: a\r\n\r\n",
    "tab after method": b"GET\t/v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "two spaces": b"GET  /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "control in target": b"GET /v1/\x7fmodels HTTP/1.1\r\nHost: a\r\n\r\n",
    "high byte in target": b"GET /v1/\xe4 HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "HTTP/1.2": b"GET /v1/models HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lower-case version": b"GET /v1/models http/1.1\r\nHost: a\r\n\r\n",
    "unknown method": b"BREW /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "lower-case method": b"get /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "junk": b"\x00\x01\x02\r\n\r\n",
    "chunk size with sign": _CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n",
    "chunk size with 0x": _CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    "chunk size with space": _CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
    "chunk size beyond numbers": _CHUNKED + b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "chunk size ends with LF": _CHUNKED + b"5\nhello\r\n0\r\n\r\n",
    "chunk ends with LF": _CHUNKED + b"5\r\nhello\n0\r\n\r\n",
    "chunk longer than said": _CHUNKED + b"5\r\nhello!\r\n0\r\n\r\n",
    "chunk extension with LF": _CHUNKED + b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "chunk without size": _CHUNKED + b"\r\nhello\r\n0\r\n\r\n",
    "trailer without colon": _CHUNKED + b"0\r\nabc\r\n\r\n",
    "unknown expectation": _HEAD + b"Expect: magic\r\nContent-Length: 5\r\n\r\nhello",
}


async def _answer(call: Call) -> None:
    await call.head()
    await call.send(ok(b"{}"))


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
@in_trio
async def test_malformed_request_is_refused_and_the_engine_sees_nothing(raw: bytes):
    """The answer is a 4xx that closes; no connection to the engine is made, no place is held."""
    async with open_door(_answer) as door:
        client = await door.client()
        await client.send(raw)
        head, _ = await client.answer()
        assert head.split(b" ", 2)[1] in {b"400", b"413", b"417"}
        assert b"Connection: close\r\n" in head
        await client.close()
        await door.idle()
        assert door.engine.calls == 0


@in_trio
async def test_broken_chunk_later_in_a_body_ends_the_request():
    """A body that breaks after the engine saw its beginning: 400, and the engine's connection is closed."""
    closed = trio.Event()

    async def script(call: Call) -> None:
        await call.head()
        await call.gone()
        closed.set()

    async with open_door(script) as door:
        client = await door.client()
        await client.send(_CHUNKED + b"5\r\nhello\r\n")
        await door.engine.seen()
        await client.send(b"zz\r\n")
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 400 ")
        await closed.wait()
        await client.close()
        await door.idle()
        assert door.journal.story == [("cancelled", "bad_request", "supervisor", "running", "connection_closed")]


@in_trio
async def test_smuggled_second_request_is_not_read():
    """After a refusal nothing else on that connection is served."""
    async with open_door(_answer) as door:
        client = await door.client()
        await client.send(MALFORMED["length and chunked"] + b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        await client.answer()
        await client.stream.send_eof()
        assert await client.to_end() == b""
        assert door.engine.calls == 0
