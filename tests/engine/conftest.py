"""What the tests with real vLLM share. `scripts/test --real` installs the engine, makes the model and names both."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.supervisor_process import Account
from fakes.tiny_engine import TinyEngine


@pytest.fixture(scope="session")
def engine() -> TinyEngine:
    """Give the real engine and its model; their absence is a failure, never a skip."""
    vllm, model = os.environ.get("TEST_VLLM", ""), os.environ.get("TEST_TINY_MODEL", "")
    if not Path(vllm).is_file() or not Path(model, "config.json").is_file():
        pytest.fail(
            "real vLLM is missing: run scripts/test --real, which installs it and makes the model", pytrace=False
        )
    return TinyEngine(Path(vllm), Path(model))


@pytest.fixture(scope="module")
def account(engine: TinyEngine) -> Iterator[Account]:
    """Give one account a module, so that its tests can share a running supervisor: a start costs 25 seconds."""
    with Account(engine.env) as account:
        yield account
