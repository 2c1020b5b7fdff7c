"""Real vLLM that prints next to nothing while it loads: what it reads, holds and computes shows that it goes on."""

import pytest

from fakes.supervisor_process import Account
from fakes.tiny_engine import START, TinyEngine

pytestmark = pytest.mark.engine


def test_a_load_without_lines_gets_ready(engine: TinyEngine, account: Account) -> None:
    """With errors alone in its log a load of 25 s outlives a limit of 8 s: not one restart."""
    quiet = ("engine.env.VLLM_LOGGING_LEVEL=ERROR", "engine.env.TQDM_DISABLE=1", "engine.start_timeout=8s")
    supervisor, client = engine.serve(account, before=tuple(word for key in quiet for word in ("--set", key)))
    with client:
        supervisor.until(client.is_ready, within=START, what="ready")
        assert client.chat().status_code == 200
    assert len(supervisor.events("spawned")) == 1, supervisor.words()
