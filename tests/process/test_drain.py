"""The drain end to end with the stand-in engine: budgets, hooks, background work, late requests, and what is written."""

import json
import signal
from typing import Any

import httpx

from fakes import drain_scenario
from fakes.books import Books
from fakes.drain_scenario import Asked, Watcher
from fakes.streams import Streams
from fakes.supervisor_process import Account, StartMock, Supervisor, chat_body

PATIENCE = 40.0  # seconds for what takes a moment on an idle machine
LOOKS = ("--set", "health.interval=200ms")


def ready(start_mock: StartMock, *options: str, sets: tuple[str, ...] = ()) -> tuple[Supervisor, Any]:
    """Start with `--set` for each of `sets`, and wait until it is ready."""
    before = [word for one in sets for word in ("--set", one)]
    supervisor, client = start_mock("--max-model-len", "1m", *options, before=(*LOOKS, *before))
    supervisor.until(client.is_ready, within=PATIENCE, what="ready")
    return supervisor, client


def test_the_published_drain_test(account: Account) -> None:
    """Accepted 3, completed 1, cancelled 2, rejected 1; what ignores cancellation is running until its process is gone."""
    rows = drain_scenario.run(account, lambda: drain_scenario.mock(account), real=False)
    assert [row for row in rows if not row.holds] == []


def test_a_background_response_is_waited_for(start_mock: StartMock, account: Account) -> None:
    """Answered at once, it is complete as a request and running as an execution, and the drain ends when it has ended."""
    account.env["VLLM_ENABLE_RESPONSES_API_STORE"] = "1"
    supervisor, client = ready(start_mock)
    body = {"model": "tiny", "input": "Hello", "background": True, "max_output_tokens": 60}
    answer = httpx.post(f"{client.url}/v1/responses", json=body, trust_env=False)
    assert answer.json()["status"] == "queued", answer.text
    status = Watcher(account).status()
    assert (status["requests"]["completed"], status["executions"]["running"]) == (1, 1)
    supervisor.signal(signal.SIGTERM)
    supervisor.until_said("answered and still running", within=PATIENCE)
    assert supervisor.ends(within=PATIENCE) == 0, supervisor.words()
    books = Books(account)
    (outcome,) = books.events("outcome")
    assert books.executions(outcome["id"]) == [("running", "answer"), ("confirmed_stopped", "counts")]
    assert books.report["took_s"]["finishing"] >= 0.5
    assert books.audit.holds


def test_a_background_response_that_takes_too_long_counts_as_cut(start_mock: StartMock, account: Account) -> None:
    """At the end of the budget it is stopped with the engine, named in the report, and the exit status says cut."""
    account.env["VLLM_ENABLE_RESPONSES_API_STORE"] = "1"
    supervisor, client = ready(start_mock, sets=("drain.budget=300ms",))
    body = {"model": "tiny", "input": "Hello", "background": True, "max_output_tokens": 100_000}
    httpx.post(f"{client.url}/v1/responses", json=body, trust_env=False)
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=PATIENCE) == 80, supervisor.words()
    books = Books(account)
    assert books.report["cut"]["by_class"] == {"responses": 1}
    assert books.report["requests"]["completed"] == 1
    assert books.last_executions() == {("confirmed_stopped", "process_gone"): 1}


def test_drain_waits_and_resume_opens(start_mock: StartMock, account: Account) -> None:
    """`drain --wait` is 1 while a stream is open and 0 when it has ended; `resume` lets requests in again."""
    supervisor, client = ready(start_mock)
    with client.stream(max_tokens=100_000, ignore_eos=True) as stream:
        next(stream)
        done = account.tool("drain", "--wait", "--timeout", "100ms")
        assert (done.returncode, "1 in flight" in done.stderr) == (1, True), done
        assert client.chat().json()["error"]["code"] == "draining"
        assert Watcher(account).status()["phase"] == "running"
    assert account.tool("drain", "--wait").returncode == 0
    assert account.tool("resume").returncode == 0
    assert client.chat().status_code == 200
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=PATIENCE) == 0


def test_the_hooks_time_comes_off_the_outer_limit(start_mock: StartMock, account: Account) -> None:
    """`drain --hook`, then TERM: the hook's time is in the plan, and all parts add up to the outer limit."""
    sets = ("drain.outer=60s", "engine.stop_grace=10s", "drain.budget=50s")
    supervisor, client = ready(start_mock, sets=sets)
    supervisor.until_said("the drain is shortened from 50 s to 40 s", within=PATIENCE)
    shown = account.tool("timeouts", "--json")
    assert shown.returncode == 1, shown
    assert json.loads(shown.stdout)["shrunk_by"] == 10.0
    with client.stream(max_tokens=100_000, ignore_eos=True) as stream:
        next(stream)
        assert account.tool("drain", "--hook", "--wait", "--timeout", "10ms").returncode == 1
        assert client.chat().status_code == 503
        supervisor.signal(signal.SIGTERM)
        supervisor.until(lambda: client.get("/readyz").json()["phase"] == "draining", within=PATIENCE, what="the drain")
    assert supervisor.ends(within=PATIENCE) == 0, supervisor.words()
    plan, late = Books(account).report["plan"], Books(account).report["late_requests"]
    assert plan["hook"] > 0.0
    parts = ("hook", "propagation", "drain", "engine_stop", "documentation", "reserve")
    assert abs(sum(plan[name] for name in parts) - 60.0) < 0.001, plan
    assert late["n"] == 1
    assert 0.0 < late["last_after_s"] <= round(plan["hook"], 3)  # to the millisecond, as the report has it


def test_propagation_refuses_and_goes_on_working(start_mock: StartMock, account: Account) -> None:
    """For drain.propagation the phase is admission_stop: late requests are refused and measured, streams go on."""
    supervisor, client = ready(start_mock, sets=("drain.propagation=2s",))
    supervisor.signal(signal.SIGTERM)
    supervisor.until(lambda: client.get("/readyz").status_code == 503, within=PATIENCE, what="readiness off")
    assert client.get("/readyz").json()["phase"] == "admission_stop"
    assert client.chat().json()["error"]["code"] == "draining"
    assert supervisor.ends(within=PATIENCE) == 0
    report = Books(account).report
    assert report["took_s"]["propagating"] >= 2.0
    assert report["late_requests"]["n"] == 1


def test_a_client_that_leaves_during_the_drain_ends_it(start_mock: StartMock, account: Account) -> None:
    """Its request is cancelled by the client, nothing of ours was cut, and the drain does not wait for its budget."""
    supervisor, client = ready(start_mock, sets=("drain.budget=10m",))
    with client.stream(max_tokens=100_000, ignore_eos=True) as stream:
        next(stream)
        supervisor.signal(signal.SIGTERM)
        supervisor.until(lambda: client.get("/readyz").status_code == 503, within=PATIENCE, what="readiness off")
    assert supervisor.ends(within=PATIENCE) == 0, supervisor.words()
    books = Books(account)
    assert books.outcomes == {("cancelled", "client_left"): 1}
    assert books.report["requests"]["cancelled"] == 1
    assert books.audit.holds


def test_an_engine_that_dies_during_the_drain_ends_it(start_mock: StartMock, account: Account) -> None:
    """Its streams fail, with an error event; the supervisor ends at once, and no new engine is started for it."""
    supervisor, client = ready(start_mock, sets=("drain.budget=10m",))
    asked = Asked(client.url, "stream", chat_body(stream=True, max_tokens=100_000, ignore_eos=True))
    thread = asked.start()
    assert asked.began.wait(PATIENCE)
    supervisor.signal(signal.SIGTERM)
    supervisor.until(lambda: client.get("/readyz").status_code == 503, within=PATIENCE, what="readiness off")
    supervisor.named("VLLM::EngineCor").kill()
    assert supervisor.ends(within=PATIENCE) == 0, supervisor.words()
    thread.join(5.0)
    assert '"error"' in "".join(asked.events)  # the engine's own or ours, whichever came first
    books = Books(account)
    assert books.report["requests"]["failed"] == 1
    assert len(books.events("engine", what="spawned")) == 1
    assert [state for state, _ in books.last_executions()] == ["confirmed_stopped"]
    account.expect_nothing_left()


def test_a_stop_while_the_engine_restarts(start_mock: StartMock, account: Account) -> None:
    """TERM between two engines, and TERM while the next one loads: exit 0, nothing left, books in order."""
    supervisor, client = ready(start_mock, "--mock-start-time", "300ms", sets=("restart.backoff=30s",))
    supervisor.named("VLLM::EngineCor").kill()
    supervisor.until(
        lambda: client.get("/readyz").json()["engine"] == "down", within=PATIENCE, what="down, waiting for the backoff"
    )
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=PATIENCE) == 0, supervisor.words()
    account.expect_nothing_left()
    assert Books(account).audit.holds


def test_a_client_that_holds_its_connection_is_refused_until_the_end(start_mock: StartMock, account: Account) -> None:
    """Twenty streams finish within the budget, each complete, while refusals go on; exit 0, all executions completed."""
    supervisor, client = ready(start_mock)
    port = int(client.url.rpartition(":")[2])
    with Streams(port, 20, max_tokens=40, ignore_eos=True) as streams:
        supervisor.signal(signal.SIGTERM)
        supervisor.until(lambda: client.get("/readyz").status_code == 503, within=PATIENCE, what="readiness off")
        refused = [client.chat().status_code for _ in range(5)]
    assert set(refused) == {503}
    assert all(seen.complete for seen in streams.seen)
    assert supervisor.ends(within=PATIENCE) == 0, supervisor.words()
    books = Books(account)
    assert books.report["requests"] == {
        "accepted": 20, "completed": 20, "failed": 0, "cancelled": 0, "open": 0, "rejected": 5,
    }  # fmt: skip
    assert books.last_executions() == {("completed", "answer"): 20}


def test_the_drain_is_shown_on_a_terminal(start_mock: StartMock) -> None:
    """A person at the terminal sees how many are in flight, the oldest and the time left, while it drains."""
    supervisor, client = start_mock("--max-model-len", "1m", before=("--set", "drain.budget=10m"), terminal=True)
    supervisor.until(client.is_ready, within=PATIENCE, what="ready")
    asked = Asked(client.url, "stream", chat_body(stream=True, max_tokens=100_000, ignore_eos=True))
    thread = asked.start()
    assert asked.began.wait(PATIENCE)
    supervisor.press_ctrl_c()
    supervisor.until_said("draining: 1 in flight, oldest 2 s", within=PATIENCE)  # pressed at once, it would count once
    supervisor.press_ctrl_c()
    assert supervisor.ends(within=PATIENCE) == 80
    thread.join(5.0)


def test_the_ledger_summary_of_a_running_supervisor(start_mock: StartMock, account: Account) -> None:
    """`GET /ledger/summary` shows this run's two registers; `ledger summary` reads the same from the files."""
    supervisor, client = ready(start_mock)
    assert client.chat().status_code == 200
    with client.stream(max_tokens=100_000, ignore_eos=True) as stream:
        next(stream)
        live = Watcher(account).get("/ledger/summary")
        read = json.loads(account.tool("ledger", "summary", "--json").stdout)
        assert account.tool("ledger", "show", "--open").stdout.count("accepted") == 1
        assert account.tool("ledger", "audit").returncode == 0
    (release,) = live["releases"]
    assert (release["accepted"], release["classes"]["chat"]["completed"], live["open_now"]) == (2, 1, 1)
    assert (read["releases"][0]["accepted"], read["open_now"]) == (2, 1)
    assert set(live) == set(read)
    assert set(release) == set(read["releases"][0])
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=PATIENCE) == 0
    dead = json.loads(account.tool("ledger", "summary", "--json").stdout)
    assert (dead["open_now"], dead["releases"][0]["classes"]["chat"]["cancelled"]) == (0, 1)
    assert account.tool("ledger", "audit").returncode == 0
    assert account.tool("timeouts").returncode == 3
