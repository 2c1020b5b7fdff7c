"""Custody of real vLLM: each of its processes killed under load, our own death, and starts that cannot succeed.

The tests that share the supervisor run in the order they stand.
"""

import concurrent.futures
import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from fakes.supervisor_process import Account, Client, Supervisor, until
from fakes.tiny_engine import START, TinyEngine

pytestmark = pytest.mark.engine

SAME = ("--name", "same", "--set", "restart.max=9")
LOAD = 4  # streams, and as many whole answers


@dataclass
class Asked:
    """One request as its client saw it end: when (wall clock), and with what."""

    data: list[str] = field(default_factory=list)
    status: int | None = None
    ended_at: float = 0.0

    @property
    def told(self) -> str:
        """The last thing it was told, without vLLM's own [DONE]."""
        said = [value for value in self.data if value != "[DONE]"]
        return said[-1] if said else ""


class Load:
    """Requests under way, a thread each."""

    def __init__(self, client: Client) -> None:
        """Open them all, and wait until every stream has its first token."""
        self.streams = [Asked() for _ in range(LOAD)]
        self.whole = [Asked() for _ in range(LOAD)]
        self._pool = concurrent.futures.ThreadPoolExecutor(2 * LOAD)
        self._client = client
        for asked in self.streams:
            self._pool.submit(self._stream, asked)
        for asked in self.whole:
            self._pool.submit(self._ask, asked)
        until(lambda: all(asked.data for asked in self.streams), within=20.0, what="every stream's first token")
        until(
            lambda: f"requests_in_flight {2 * LOAD}\n" in client.get("/metrics").text,
            within=20.0,
            what="the load is on",
        )

    def _stream(self, asked: Asked) -> None:
        try:
            with self._client.stream(max_tokens=30_000, ignore_eos=True) as stream:
                for value in stream:
                    asked.data.append(value)
        except httpx.TransportError:
            pass  # aborted after the error event
        finally:
            asked.ended_at = time.time()

    def _ask(self, asked: Asked) -> None:
        try:
            answer = self._client.chat(max_tokens=30_000, ignore_eos=True)
            asked.status = answer.status_code
            asked.data.append(answer.text)
        finally:
            asked.ended_at = time.time()

    def wait(self) -> list[Asked]:
        """Wait for all ends."""
        self._pool.shutdown(wait=True)
        return [*self.streams, *self.whole]


def identities(supervisor: Supervisor) -> set[tuple[int, float]]:
    """Give every process of the engine as (pid, start time)."""
    return {(process.pid, process.create_time()) for process in supervisor.descendants()}


def alive(process: tuple[int, float]) -> bool:
    """Say whether this very process still runs."""
    try:
        found = psutil.Process(process[0])
        return found.create_time() == process[1] and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def segments(supervisor: Supervisor) -> set[Path]:
    """Give what the engine's processes map of /dev/shm."""
    found: set[Path] = set()
    for process in supervisor.descendants():
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        found |= {Path(path) for path in re.findall(r" (/dev/shm/.*)$", maps, re.MULTILINE) if "(deleted)" not in path}
    return found


def at(event: dict[str, object]) -> float:
    """Give the wall clock of an event."""
    return datetime.fromisoformat(str(event["at"])).timestamp()


@pytest.fixture(scope="module")
def served(engine: TinyEngine, account: Account) -> Iterator[tuple[Supervisor, Client]]:
    """Give the one supervisor of this module, with a ready engine."""
    supervisor, client = engine.serve(account, before=SAME)
    with client:
        supervisor.until(client.is_ready, within=START, what="ready")
        yield supervisor, client


@pytest.mark.parametrize(
    ("name", "cause"), [("vllm", "killed"), ("VLLM::EngineCore", "part_died"), ("VLLM::Worker", "part_died")]
)
def test_a_killed_part_is_answered_for_and_replaced(name: str, cause: str, served: tuple[Supervisor, Client]) -> None:
    """Clients are told within a second, nothing of the old engine runs when the next is spawned, and that is soon."""
    supervisor, client = served
    life = len(supervisor.events("spawned"))
    supervisor.until(client.is_ready, within=START, what="ready")
    old, mapped = identities(supervisor), segments(supervisor)
    assert mapped, "no shared memory is mapped, so nothing is shown"
    load = Load(client)
    victim = supervisor.named(name)
    killed = time.time()
    victim.kill()

    supervisor.until(lambda: len(supervisor.events("spawned")) > life, within=20.0, what="the next engine")
    assert not [process for process in old if alive(process)]
    assert not [path for path in mapped if path.exists()]
    refused = client.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
    assert 1 <= int(refused.headers["Retry-After"]) <= 60

    for asked in load.wait():
        assert asked.ended_at - killed < 1.0, (asked.ended_at - killed, asked.status, asked.data[-2:])
        assert '"error"' in asked.told, asked
        assert asked.status in (None, 500, 502)
    backoff = float(re.findall(r"in ([\d.]+) s", supervisor.events("backing_off")[-1]["sentence"])[0])
    assert at(supervisor.events("spawned")[-1]) - killed < 1.0 + backoff + 0.05  # the sentence has one decimal
    end = supervisor.events("exited")[-1]
    assert (end["cause"], end["requests_lost"]) == (cause, 2 * LOAD), end
    assert name == "vllm" or name in end["sentence"]


def test_what_was_restarted_is_told(served: tuple[Supervisor, Client], account: Account) -> None:
    """Status and metrics count the restarts by cause, and tell of the last what it cost."""
    supervisor, client = served
    supervisor.until(client.is_ready, within=START, what="ready")
    told = json.loads(account.tool("--name", "same", "status", "--json").stdout)["restarts"]
    assert told["by_cause"] == {"killed": 1, "part_died": 2}
    assert (told["last"]["cause"], told["last"]["requests_lost"]) == ("part_died", 2 * LOAD)
    assert told["last"]["ready_after_s"] > 5
    assert 'vllm_supervisor_restarts_total{cause="part_died"} 2' in client.get("/metrics").text


def test_a_killed_supervisor_leaves_no_rival(
    served: tuple[Supervisor, Client], engine: TinyEngine, account: Account
) -> None:
    """Under load: the next start ends the leftover engine, becomes ready, and closes the books of the lost run."""
    first, client = served
    old, mapped = identities(first), segments(first)
    load = Load(client)
    first.kill()
    load.wait()
    assert [process for process in old if alive(process)], "nothing was left behind, so nothing is shown"
    second, client = engine.serve(account, before=SAME)
    with client:
        second.until(lambda: second.events("spawned"), within=20.0, what="spawned")
        assert not [process for process in old if alive(process)]
        assert not [path for path in mapped if path.exists()]
        second.until(client.is_ready, within=START, what="ready")
        assert client.chat().status_code == 200
        said = second.until(lambda: second.events("recovered"), within=10.0, what="recovered")[0]["sentence"]
        assert f"{2 * LOAD} executions proven stopped, 0 unknown" in said
        second.signal(signal.SIGTERM)
        assert second.ends(within=40.0) == 0, second.words()
    assert account.tool("--name", "same", "ledger", "audit").returncode == 0
    account.expect_nothing_left()


class Doomed(NamedTuple):
    """A start that cannot succeed: `how` is restart.on_give_up, `status` None where that parks."""

    how: str
    terminal: bool
    options: tuple[str, str]
    reason: str
    status: int | None


@pytest.mark.parametrize(
    "doomed",
    [
        Doomed("auto", True, ("--no-such-option", "3"), "--no-such-option", 78),
        Doomed("exit", False, ("--max-model-len", "10000000"), "max_model_len (10000000)", 78),
        Doomed("auto", False, ("--tokenizer", "/nowhere/at/all"), "/nowhere/at/all", None),
        Doomed("park", True, ("--dtype", "float7"), "--dtype", None),
    ],
    ids=lambda doomed: doomed.options[0],
)
def test_a_start_that_cannot_succeed_is_tried_once(doomed: Doomed, engine: TinyEngine, account: Account) -> None:
    """One attempt in each mode; the reason stands in the last line, or at the address, in the status and in the log."""
    how = ("--name", "doomed", "--set", f"restart.on_give_up={doomed.how}", "--set", "log.format=json")
    supervisor, client = engine.serve(account, *doomed.options, before=how, terminal=doomed.terminal)
    with client:
        if doomed.status is not None:
            assert supervisor.ends(within=60.0) == doomed.status, supervisor.words()
            assert doomed.reason in supervisor.shown()[-1]
        else:
            supervisor.until(lambda: supervisor.events("parked"), within=60.0, what="parked")
            assert doomed.reason in supervisor.events("parked")[0]["sentence"]
            assert client.get("/readyz").json()["reason"].startswith("the engine failed to start: ")
            assert (
                doomed.reason
                in json.loads(account.tool("--name", "doomed", "status", "--json").stdout)["engine"]["problem"]
            )
            refused = client.chat()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_parked")
            supervisor.signal(signal.SIGTERM)
            assert supervisor.ends(within=20.0) == 0, supervisor.words()
    assert len(supervisor.events("spawned")) == 1
    account.expect_nothing_left()
