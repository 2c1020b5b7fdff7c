"""Beside a bare `vllm serve` of this machine: its port is respected while it loads, and it is named."""

import json
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from fakes.ports import free_port
from fakes.supervisor_process import Account, until
from fakes.tiny_engine import START, TinyEngine
from vllm_supervisor.adapters import ports

pytestmark = pytest.mark.engine


@pytest.fixture
def bare(engine: TinyEngine, account: Account) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Give a bare vLLM in its load, and the port it has bound and does not listen on."""
    port = free_port()
    argv = (str(engine.vllm), "serve", str(engine.model), *engine.options, "--host", "127.0.0.1", "--port", str(port))
    with subprocess.Popen(
        argv, env=account.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        family = psutil.Process(process.pid)
        try:
            until(lambda: ports._only_bound(port, b"\x7f\0\0\1"), within=2 * START, what="the port to be bound")
            yield process, port
        finally:
            children = family.children(recursive=True)
            for one in (*children, family):
                one.send_signal(signal.SIGKILL)


def test_a_port_that_bare_vllm_has_bound_is_refused_before_our_load(
    engine: TinyEngine, account: Account, bare: tuple[subprocess.Popen[bytes], int]
) -> None:
    """78 and one line with its pid while it loads; no second engine was started; `doctor` names it with port and memory."""
    process, port = bare
    argv = ("--set", f"engine.command={engine.vllm}", "serve", str(engine.model), *engine.options)
    supervisor = account.start(*argv, "--host", "127.0.0.1", "--port", str(port))
    assert supervisor.ends(within=30.0) == 78, supervisor.words()
    assert process.poll() is None
    [line] = supervisor.err.text.strip().splitlines()
    assert f"127.0.0.1:{port} is bound by pid {process.pid} (" in line
    assert "does not listen yet" in line
    assert "VLLM::" not in supervisor.out.text
    found = json.loads(account.tool("doctor", "--json", within=60.0).stdout)["findings"]
    named = [finding["what"] for finding in found if finding["check"] == "bare_vllm"]
    assert any(f"vllm serve (pid {process.pid}, port {port}, " in what for what in named), named
