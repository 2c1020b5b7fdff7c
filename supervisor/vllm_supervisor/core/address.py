"""Where something listens: a Unix socket path, or a host and a port."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix stream socket; Linux bounds the path to 107 bytes."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP host and port; an empty host means every address, as in vLLM. IPv6 hosts stand without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host or "0.0.0.0"
        return f"{host}:{self.port}"


Address = UnixAddress | TcpAddress
