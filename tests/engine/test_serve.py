"""`vllm-supervisor serve` with real vLLM, start to end. The tests share one engine and run in the order they stand."""

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.supervisor_process import Account, Client, Supervisor
from fakes.tiny_engine import START, TinyEngine

pytestmark = pytest.mark.engine

OPENAI = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
messages = [{"role": "user", "content": "Hello"}]
whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
assert whole.choices[0].finish_reason in ("length", "stop"), whole
chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, stream=True))
assert chunks[-1].choices[0].finish_reason in ("length", "stop"), chunks
"""


@pytest.fixture(scope="module")
def served(engine: TinyEngine, account: Account) -> Iterator[tuple[Supervisor, Client]]:
    """Give the one supervisor of this module, just started."""
    supervisor, client = engine.serve(account)
    with client:
        yield supervisor, client


def requests(account: Account, client: Client) -> dict[str, int]:
    """Give the counts of requests that the status of the supervisor on the client's port shows."""
    told = account.tool("--name", str(client.port), "status", "--json")
    counts: dict[str, int] = json.loads(told.stdout)["requests"]
    return counts


def test_while_it_loads_every_path_answers_and_then_it_serves(served: tuple[Supervisor, Client]) -> None:
    """The address answers from the first second: 503 engine_starting for requests, 200 for liveness; then 200."""
    supervisor, client = served
    supervisor.until(client.listens, within=10.0, what="the front door listens")
    early = client.chat()
    assert early.status_code == 503
    assert early.json()["error"]["code"] == "engine_starting"
    assert 1 <= int(early.headers["Retry-After"]) <= 60
    assert client.get("/livez").status_code == 200
    assert client.get("/health").status_code == 503
    assert client.get("/startupz").status_code == 503
    supervisor.until(client.is_ready, within=START, what="ready")
    assert client.chat().status_code == 200
    for path in ("/health", "/startupz", "/readyz", "/v1/models", "/version"):
        assert client.get(path).status_code == 200, path


def test_the_engine_listens_on_a_private_socket_only(served: tuple[Supervisor, Client], account: Account) -> None:
    """The engine's HTTP is on a Unix socket in the private run directory; nothing of it listens beyond loopback."""
    supervisor, client = served
    argv = supervisor.named("vllm").cmdline()
    socket = Path(argv[len(argv) - argv[::-1].index("--uds")])
    assert socket.is_relative_to(account.home / "run")
    assert socket.is_socket()
    assert socket.parent.stat().st_mode & 0o077 == 0
    listeners = [
        connection.laddr
        for process in supervisor.descendants()
        for connection in process.net_connections(kind="tcp")
        if connection.status == "LISTEN"
    ]
    assert all(ip in {"127.0.0.1", "::1"} and port != client.port for ip, port in listeners), listeners


def test_metrics_hold_the_engines_series_and_ours(served: tuple[Supervisor, Client]) -> None:
    """/metrics is the engine's own exposition followed by ours."""
    text = served[1].get("/metrics").text
    assert "vllm:num_requests_running" in text
    assert "vllm_supervisor_" in text
    assert text.index("vllm:num_requests_running") < text.index("vllm_supervisor_")


def test_the_openai_package_works_through_it(
    served: tuple[Supervisor, Client], engine: TinyEngine, account: Account
) -> None:
    """The openai client gets a whole answer and a stream, both with a proper finish."""
    engine.client(account, str(engine.python), "-c", OPENAI, served[1].url)


def test_vllms_own_load_client_sees_no_failure(
    served: tuple[Supervisor, Client], engine: TinyEngine, account: Account
) -> None:
    """`vllm bench serve`: 200 requests, 32 at once, none fails, and the account of the gate agrees afterwards."""
    before = requests(account, served[1])
    shape = ("--num-prompts", "200", "--max-concurrency", "32", "--random-input-len", "32", "--random-output-len", "16")
    what = ("--dataset-name", "random", "--tokenizer", str(engine.model), "--model", "tiny", "--disable-tqdm")
    bench = (str(engine.vllm), "bench", "serve", "--backend", "openai", "--base-url", served[1].url)
    said = engine.client(account, *bench, *what, *shape).stdout
    assert re.search(r"Successful requests: +200\b", said), said
    assert re.search(r"Failed requests: +0\b", said), said
    after = requests(account, served[1])
    assert after["completed"] - before["completed"] >= 200
    assert after["failed"] == before["failed"]
    assert after["open"] == 0


def test_a_stop_during_a_stream_loses_nothing(served: tuple[Supervisor, Client], account: Account) -> None:
    """TERM: the stream completes with [DONE], a late request is told draining and never 500, exit 0, nothing left."""
    supervisor, client = served
    seen: list[int] = []
    with client.stream(max_tokens=1500, ignore_eos=True) as stream:
        next(stream)
        supervisor.signal(signal.SIGTERM)
        supervisor.until(lambda: client.get("/readyz").status_code == 503, within=5.0, what="admission closed")
        first = client.chat()
        assert (first.status_code, first.json()["error"]["code"]) == (503, "draining")
        rest: list[str] = []
        for data in stream:
            rest.append(data)
            if len(rest) % 200 == 0:
                seen.append(client.chat().status_code)
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert seen
    assert set(seen) == {503}
    assert supervisor.ends(within=40.0) == 0, supervisor.words()
    account.expect_nothing_left()
    assert "Found duplicate keys" not in supervisor.out.text
    assert [line for line in supervisor.log() if line["level"] == "warning"] == []  # of a stop that went well


def test_a_stop_in_the_middle_of_the_load_ends_within_the_stop_budget(engine: TinyEngine, account: Account) -> None:
    """A loading vLLM ignores TERM; the supervisor kills it after 5 s, exits 0, and no process is left."""
    supervisor, client = engine.serve(account)
    with client:
        supervisor.named("VLLM::EngineCore", within=START)
        asked = time.monotonic()
        supervisor.signal(signal.SIGTERM)
        assert supervisor.ends(within=20.0) == 0, supervisor.words()
        assert time.monotonic() - asked < 15.0  # 5 s for the engine, the rest for a busy machine
    account.expect_nothing_left()
