"""Whose request it is, as the engine is told: what uvicorn would have found out if the client had come to it."""

import pytest

from vllm_supervisor.core.forwarding import UNKNOWN, Forwarding, Said

DEFAULT = "127.0.0.1"
PROXY = "127.0.0.1"
STRANGER = "203.0.113.7"


def fields(lines: bytes) -> dict[str, str]:
    """Read header lines."""
    pairs = [line.split(": ", 1) for line in lines.decode("latin-1").split("\r\n")[:-1]]
    assert len(pairs) == len({name for name, _ in pairs})
    return dict(pairs)


@pytest.mark.parametrize(
    ("trusted", "peer", "said", "chain"),
    [
        # Nobody forwards: the peer is the client.
        (DEFAULT, STRANGER, None, STRANGER),
        (DEFAULT, PROXY, None, PROXY),
        (DEFAULT, "2001:db8::7", None, "2001:db8::7"),
        (DEFAULT, "fe80::1%eth0", None, "fe80::1%eth0"),
        # A stranger's word counts for nothing.
        (DEFAULT, STRANGER, (b"10.0.0.1", None), STRANGER),
        ("", PROXY, (b"10.0.0.1", None), PROXY),
        # A trusted proxy's does, from the last address on that is no proxy.
        (DEFAULT, PROXY, (b"198.51.100.9", None), "198.51.100.9"),
        (DEFAULT, PROXY, (b"6.6.6.6, 198.51.100.9", None), "198.51.100.9"),
        (DEFAULT, PROXY, (b"6.6.6.6,198.51.100.9,127.0.0.1", None), "198.51.100.9, 127.0.0.1"),
        ("10.0.0.0/8", "10.1.2.3", (b"6.6.6.6, 198.51.100.9, 10.9.9.9", None), "198.51.100.9, 10.9.9.9"),
        ("10.0.0.0/8, 127.0.0.1", PROXY, (b"10.1.1.1, 10.2.2.2", None), "10.1.1.1, 10.2.2.2"),
        (DEFAULT, PROXY, (b"198.51.100.9:4711", None), "198.51.100.9:4711"),
        (DEFAULT, PROXY, (b"6.6.6.6, 127.0.0.1:80", None), "6.6.6.6, 127.0.0.1:80"),
        ("::1", "::1", (b"[2001:db8::9]:4711, [::1]:80", None), "[2001:db8::9]:4711, [::1]:80"),
        ("2001:DB8::/32", "2001:db8::1", (b"198.51.100.9", None), "198.51.100.9"),
        # Everybody is trusted.
        ("*", STRANGER, (b"6.6.6.6, 198.51.100.9", None), "6.6.6.6, 198.51.100.9"),
        # Nonsense is no address of a proxy, and an empty field says nothing.
        (DEFAULT, PROXY, (b"unknown", None), "unknown"),
        (DEFAULT, PROXY, (b"", None), PROXY),
        ("127.0.0.1,", PROXY, (b"6.6.6.6,", None), PROXY),
        ("10.0.0.1/8", "10.0.0.1", (b"6.6.6.6", None), "10.0.0.1"),  # no network, so it names nobody
        (DEFAULT, PROXY, (b"\xff\xfe", None), "\xff\xfe"),
    ],
)
def test_whose_address(trusted: str, peer: str, said: Said | None, chain: str) -> None:
    """The engine reads the first address of the chain it is given, and that is the client."""
    forwarding = Forwarding(trusted)
    assert fields(forwarding.lines(forwarding.peer(peer), said)).get("X-Forwarded-For") == chain


@pytest.mark.parametrize(
    ("https", "peer", "said", "proto"),
    [
        (False, STRANGER, None, "http"),
        (True, STRANGER, None, "https"),
        (False, STRANGER, (None, b"https"), "http"),
        (True, STRANGER, (b"1.2.3.4", b"http"), "https"),
        (False, PROXY, (None, b"https"), "https"),
        (False, PROXY, (b"1.2.3.4", None), "http"),
        (True, PROXY, (None, b"wss"), "wss"),
    ],
)
def test_whether_by_tls(https: bool, peer: str, said: Said | None, proto: str) -> None:
    """The scheme is that of our own listener, unless a trusted proxy knows better."""
    forwarding = Forwarding(DEFAULT, https=https)
    assert fields(forwarding.lines(forwarding.peer(peer), said))["X-Forwarded-Proto"] == proto


def test_a_unix_socket_has_no_address() -> None:
    """Without an address nothing is claimed; who may open the socket is believed as a trusted proxy is."""
    forwarding = Forwarding(DEFAULT)
    assert forwarding.lines(UNKNOWN, None) == b""
    said = fields(forwarding.lines(UNKNOWN, (b"6.6.6.6, 198.51.100.9", b"https")))
    assert said == {"X-Forwarded-For": "198.51.100.9", "X-Forwarded-Proto": "https"}


def test_a_long_chain_costs_little() -> None:
    """Of a chain without end, made of trusted addresses, only its last ones are looked at and passed on."""
    forwarding = Forwarding(DEFAULT)
    chain = b",".join([b"6.6.6.6"] + [b"127.0.0.1"] * 5000)
    kept = fields(forwarding.lines(forwarding.peer(PROXY), (chain, None)))["X-Forwarded-For"]
    assert kept == ", ".join(["127.0.0.1"] * 32)
