"""What the tests at process speed share: a test account, and a supervisor with the stand-in engine."""

from collections.abc import Iterator

import pytest

from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, StartMock, Supervisor


@pytest.fixture
def account() -> Iterator[Account]:
    """Give an account of its own; whatever a test leaves in it is removed, processes first."""
    with Account() as account:
        yield account


@pytest.fixture
def start_mock(account: Account) -> Iterator[StartMock]:
    """Give a call that starts `--engine mock serve tiny` on a free port: (options of serve, own options before it)."""
    clients: list[Client] = []

    def start(
        *options: str, before: tuple[str, ...] = (), terminal: bool = False, under: tuple[str, ...] = ()
    ) -> tuple[Supervisor, Client]:
        port = free_port()
        address = ("--host", "127.0.0.1", "--port", str(port))
        words = (*before, "--engine", "mock", "serve", "tiny", *address, *options)
        supervisor = account.start(*words, terminal=terminal, under=under)
        clients.append(Client(port))
        return supervisor, clients[-1]

    yield start
    for client in clients:
        client.close()
