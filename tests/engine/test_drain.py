"""The drain and the two ledgers with real vLLM: what is finished, what is cut, and what its scheduler says of it."""

import signal
import time
from collections import Counter

import httpx
import pytest

from fakes import drain_scenario
from fakes.books import Books
from fakes.drain_scenario import Asked, Watcher
from fakes.streams import Streams
from fakes.supervisor_process import Account, Client, Supervisor, chat_body, until
from fakes.tiny_engine import START, TinyEngine

pytestmark = pytest.mark.engine

ALL = 20  # streams at once; eight run, the others wait in the engine


def start(
    engine: TinyEngine, account: Account, *options: str, sets: tuple[str, ...] = ()
) -> tuple[Supervisor, Client, int]:
    """Start, with `--set` for each of `sets`, and wait until it is ready; give the port as well."""
    supervisor, client = engine.serve(account, *options, before=tuple(w for one in sets for w in ("--set", one)))
    supervisor.until(client.is_ready, within=START, what="ready")
    return supervisor, client, int(client.url.rpartition(":")[2])


def expect_engine_confirmed(books: Books, why: str) -> None:
    """Fail unless the engine's scheduler confirmed the end of each request that ended for `why`."""
    number = sum(count for (_, word), count in books.outcomes.items() if word == why)
    assert number
    assert books.last_executions(why=why) == {("confirmed_stopped", "engine_confirmed"): number}, books.report


@pytest.mark.parametrize("servers", ["1", "2"])
def test_the_published_drain_test(engine: TinyEngine, servers: str) -> None:
    """Accepted 3, completed 1, cancelled 2, rejected 1; what cannot hear its cancellation runs until its process is gone."""
    with Account(engine.env) as account:
        serve = lambda: engine.serve(account, "--api-server-count", servers, before=drain_scenario.BUDGET)  # noqa: E731
        rows = drain_scenario.run(account, serve, real=True)
    assert [row for row in rows if not row.holds] == []


def test_a_hook_then_a_stop_that_has_time_loses_nothing(engine: TinyEngine) -> None:
    """Tools first; then 20 streams and a background response: hook, TERM, all complete, the hook's time in the plan, exit 0."""
    with Account({**engine.env, "VLLM_ENABLE_RESPONSES_API_STORE": "1"}) as account:
        supervisor, client, port = start(engine, account, sets=("drain.budget=5m", "drain.outer=6m"))
        with client:
            with client.stream(max_tokens=1500, ignore_eos=True) as stream:
                next(stream)
                assert account.tool("drain", "--wait", "--timeout", "100ms").returncode == 1
                assert list(stream)[-1] == "[DONE]"
            assert account.tool("drain", "--wait").returncode == 0
            assert client.chat().status_code == 503
            assert account.tool("resume").returncode == 0
            body = {"model": "tiny", "input": "Hello", "background": True, "max_output_tokens": 1500}
            answer = httpx.post(f"{client.url}/v1/responses", json=body, trust_env=False, timeout=30.0).json()
            assert answer["status"] == "queued", answer
            with Streams(port, ALL, first=4, max_tokens=300, ignore_eos=True) as streams:
                accepted = Watcher(account)
                supervisor.until(
                    lambda: accepted.status()["requests"]["accepted"] >= ALL + 2, within=20.0, what="all accepted"
                )
                assert account.tool("drain", "--hook").returncode == 0
                supervisor.signal(signal.SIGTERM)
            assert all(seen.complete for seen in streams.seen)
            assert supervisor.ends(within=120.0) == 0, supervisor.words()
        books = Books(account)
        assert books.outcomes == {("completed", ""): ALL + 2}
        (background,) = books.events("accepted", **{"class": "responses"})
        assert books.executions(background["id"]) == [("running", "answer"), ("completed", "engine_confirmed")]
        assert books.report["plan"]["hook"] > 0.0
        assert books.audit.holds
        account.expect_nothing_left()


def test_what_a_short_budget_cuts_is_confirmed_by_the_engine(engine: TinyEngine) -> None:
    """20 streams, 1 s: each is told drain_deadline or had left, the scheduler confirms the end of each, exit 80."""
    with Account(engine.env) as account:
        supervisor, client, port = start(engine, account, sets=("drain.budget=1s", "health.interval=200ms"))
        with client:
            with (
                Streams(port, ALL - 1, first=7, max_tokens=30_000, ignore_eos=True) as streams,
                client.stream(max_tokens=30_000, ignore_eos=True),
            ):
                watcher = Watcher(account)

                def at_engine() -> bool:
                    health = watcher.status()["health"]
                    return (health["running"] or 0) + (health["waiting"] or 0) == ALL

                # One that vLLM's front end still holds when it is cut never reaches the scheduler, which then says nothing.
                supervisor.until(at_engine, within=60.0, what="all in the scheduler")
                supervisor.signal(signal.SIGTERM)
                supervisor.until(lambda: client.get("/readyz").status_code == 503, within=5.0, what="readiness off")
                # The client of our own stream leaves here, during the drain.
            assert supervisor.ends(within=40.0) == 80, supervisor.words()
        books = Books(account)
        told = Counter(seen.data[-1] if seen.data else seen.error for seen in streams.seen)
        assert sum(n for text, n in told.items() if '"drain_deadline"' in text) >= 7, (told, books.report)
        assert books.outcomes == {("cancelled", "drain_deadline"): ALL - 1, ("cancelled", "client_left"): 1}
        expect_engine_confirmed(books, "drain_deadline")
        expect_engine_confirmed(books, "client_left")
        assert books.report["cut"]["n"] == ALL - 1
        assert books.audit.holds
        account.expect_nothing_left()


def test_a_second_signal_cuts_at_once(engine: TinyEngine) -> None:
    """With ten minutes to drain, the second TERM ends it within seconds, and the engine still confirms what it stopped."""
    with Account(engine.env) as account:
        supervisor, client, port = start(engine, account, sets=("drain.budget=10m",))
        with client, Streams(port, 4, max_tokens=30_000, ignore_eos=True):
            asked = time.monotonic()
            supervisor.signal(signal.SIGTERM)
            supervisor.until(lambda: client.get("/readyz").status_code == 503, within=5.0, what="readiness off")
            until(lambda: time.monotonic() - asked > 1.1, within=5.0, what="a second, in which another would not count")
            again = time.monotonic()
            supervisor.signal(signal.SIGTERM)
            assert supervisor.ends(within=20.0) == 80, supervisor.words()
            assert time.monotonic() - again < 10.0
        expect_engine_confirmed(Books(account), "drain_deadline")
        account.expect_nothing_left()


def test_a_core_that_dies_during_the_drain_ends_it(engine: TinyEngine) -> None:
    """EngineCore killed while a stream drains: the client is told engine_failed, no new engine starts, nothing is left."""
    with Account(engine.env) as account:
        supervisor, client, _ = start(engine, account, sets=("drain.budget=10m",))
        with client:
            asked = Asked(client.url, "stream", chat_body(stream=True, max_tokens=30_000, ignore_eos=True))
            thread = asked.start()
            assert asked.began.wait(20.0)
            supervisor.signal(signal.SIGTERM)
            supervisor.until(lambda: client.get("/readyz").status_code == 503, within=5.0, what="readiness off")
            supervisor.named("VLLM::EngineCor").kill()
            assert supervisor.ends(within=20.0) == 0, supervisor.words()
            thread.join(5.0)
        assert '"error"' in "".join(asked.events)  # the engine's own or ours, whichever came first
        books = Books(account)
        assert books.report["requests"]["failed"] == 1
        assert len(books.events("engine", what="spawned")) == 1
        assert books.audit.holds
        account.expect_nothing_left()


def test_a_stop_while_the_next_engine_loads(engine: TinyEngine) -> None:
    """A restart somebody ordered, and TERM during the second load: exit 0 within the stop budget, nothing left."""
    with Account(engine.env) as account:
        supervisor, client, _ = start(engine, account)
        with client:
            assert account.tool("restart", "--reason", "a test").returncode == 0
            supervisor.until_said("engine 2 started", within=60.0)
            supervisor.until(
                lambda: any(process.name().startswith("VLLM::EngineCor") for process in supervisor.descendants()),
                within=START,
                what="the core of the next engine",
            )
            supervisor.signal(signal.SIGTERM)
            assert supervisor.ends(within=20.0) == 0, supervisor.words()
        assert Books(account).audit.holds
        account.expect_nothing_left()
