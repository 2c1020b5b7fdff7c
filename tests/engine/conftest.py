"""What the tests with real vLLM share. `scripts/test --real` installs the engine, makes the model and names both."""

from collections.abc import Iterator

import pytest

from fakes.supervisor_process import Account
from fakes.tiny_engine import TinyEngine


@pytest.fixture(scope="session")
def engine() -> TinyEngine:
    """Give the real engine and its model; their absence is a failure, never a skip."""
    return TinyEngine.installed()


@pytest.fixture(scope="module")
def account(engine: TinyEngine) -> Iterator[Account]:
    """Give one account a module, so that its tests can share a running supervisor: a start costs 25 seconds."""
    with Account(engine.env) as account:
        yield account
