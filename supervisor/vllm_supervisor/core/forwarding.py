"""What the engine is told of a client: its address and whether it came by TLS, as if it had connected to the engine.

Rules:
* uvicorn alone would take the peer's address, and believe `X-Forwarded-For` and `X-Forwarded-Proto` only from the proxies
  that `FORWARDED_ALLOW_IPS` names (default: 127.0.0.1). The front door does the same in its stead, and the engine then
  believes the front door.
* From a proxy that is trusted, the chain is passed on from the last address that is no trusted proxy: uvicorn takes the
  first one of a chain it believes, and what stands further left is the client's own word.
* From anybody else both fields are replaced. On a Unix socket a peer has no address: who may open it is trusted.

Source: uvicorn 0.54, uvicorn/middleware/proxy_headers.py.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

FOR, PROTO = b"x-forwarded-for", b"x-forwarded-proto"
NOTED = frozenset({FOR, PROTO})
Said = tuple[bytes | None, bytes | None]  # values of X-Forwarded-For and X-Forwarded-Proto
_MAX_CHAIN = 32  # addresses of a chain that are looked at, from the right


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is on the other end of a client's connection: `lines` are the header lines that say so."""

    lines: bytes
    trusted: bool


UNKNOWN = Peer(b"", trusted=True)  # on a Unix socket


class Forwarding:
    """The fields for each client, under one list of trusted proxies."""

    def __init__(self, trusted_proxies: str = "127.0.0.1", *, https: bool = False) -> None:
        """`trusted_proxies` as FORWARDED_ALLOW_IPS; `https`: clients come by TLS."""
        self._all = trusted_proxies.strip() == "*"
        self._proto = b"X-Forwarded-Proto: https\r\n" if https else b"X-Forwarded-Proto: http\r\n"
        self._literals: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for text in trusted_proxies.split(","):
            try:
                self._networks.append(ipaddress.ip_network(text.strip()))
            except ValueError:
                self._literals.add(text.strip())
        self.peer: Callable[[str], Peer] = lru_cache(maxsize=1024)(self._peer)  # clients come back
        self._trusts: Callable[[str], bool] = lru_cache(maxsize=1024)(self._is_trusted)

    def _peer(self, host: str) -> Peer:
        """Describe the peer with the address `host`."""
        return Peer(_chain(host.encode("latin-1", "replace")) + self._proto, self._trusts(host))

    def lines(self, peer: Peer, said: Said | None) -> bytes:
        """Return the header lines for a request of `peer` that came with `said`."""
        if said is None or not peer.trusted:
            return peer.lines
        chain, proto = said
        own_chain = peer.lines[: -len(self._proto)]
        believed = b"" if chain is None else self._believed(chain.decode("latin-1")).encode("latin-1")
        own_proto = self._proto if proto is None else b"X-Forwarded-Proto: %b\r\n" % proto
        return (_chain(believed) if believed else own_chain) + own_proto

    def _believed(self, chain: str) -> str:
        """Return the part of a chain from the last address on that is no trusted proxy; all of it if there is none."""
        if self._all:
            return chain
        hosts = [host.strip() for host in chain.split(",")]
        for index in range(len(hosts) - 1, max(-1, len(hosts) - 1 - _MAX_CHAIN), -1):
            if not self._trusts(_without_port(hosts[index])):
                return ", ".join(hosts[index:])
        return ", ".join(hosts[-_MAX_CHAIN:])

    def _is_trusted(self, host: str) -> bool:
        if self._all or not host:
            return self._all
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host in self._literals
        return any(address in network for network in self._networks)


def _chain(addresses: bytes) -> bytes:
    return b"X-Forwarded-For: %b\r\n" % addresses


def _without_port(host: str) -> str:
    """Take the port off `1.2.3.4:5` and `[::1]:5`, and leave everything else as it is."""
    if host.startswith("[") and "]" in host:
        return host[1 : host.index("]")]
    name, colon, port = host.partition(":")
    return name if colon and port.isdigit() else host
