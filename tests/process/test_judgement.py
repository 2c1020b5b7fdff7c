"""Judgement end to end with the stand-in's faults: each gets its verdict and its action, with waits of half a second.

The tests of the first part share one supervisor; each leaves it with an engine that is ready and without a fault.
"""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakes.judged import Judged, asking, settings
from fakes.ports import free_port
from fakes.supervisor_process import Account, Client, until

SHORT = (
    "health.interval=100ms",
    'health.waits=["500ms", "500ms"]',
    'health.waits_slow=["500ms", "500ms"]',
    "health.probe_interval=0",
    "health.failing_after=300ms",
    "engine.stop_grace=100ms",
    "restart.stuck_max=1000",
    "restart.max=1000",
    "restart.backoff=10ms",
    "restart.backoff_max=10ms",
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Judged]:
    """Give the supervisor of the first part."""
    with Account({"VLLM_SERVER_DEV_MODE": "1"}) as account:
        yield from _start(account, "--mock-start-time", "0", "--max-model-len", "1m")


def _start(account: Account, *options: str, more: tuple[str, ...] = ()) -> Iterator[Judged]:
    port = free_port()
    argv = ("--engine", "mock", "serve", "tiny", "--host", "127.0.0.1", "--port", str(port), *options)
    supervisor = account.start(*settings(*SHORT, *more), *argv)
    with Client(port) as client:
        judged = Judged(account, supervisor, client)
        judged.supervisor.until(client.is_ready, within=15.0, what="ready")
        yield judged
        judged.close()


HANGS: list[tuple[tuple[str, str | None], ...]] = [
    (("hang_steps", None),),
    (("hang_scheduling", None),),
    (("hang_first_step", None),),
    (("hang_http", None),),
    (("metrics_absent", None), ("hang_steps", None)),
    (("metrics_multiprocess", None), ("metrics_renamed", None), ("hang_steps", None)),
    (("metrics_slow", "20s"), ("hang_steps", None)),
]


@pytest.mark.parametrize("faults", HANGS, ids=["+".join(name for name, _ in faults) for faults in HANGS])
def test_a_hang_is_found_and_ended(shared: Judged, faults: tuple[tuple[str, str | None], ...]) -> None:
    """Whatever the metrics show, a request without an answer proves the hang: evidence, restart, the client is told."""
    before, hung = shared.restarts.get("hang", 0), shared.ready().status()["engine"]["incarnation"]
    bundles = len(shared.bundles)
    for name, value in faults:
        shared.fault(name, value)
    with asking(shared.client) as answers:
        shared.wait(lambda status: status["restarts"]["by_cause"].get("hang", 0) > before, "restarted for a hang")
    assert "engine_failed" in answers[0] or answers == [""], answers
    assert "[DONE]" not in answers[0]
    shared.ready(hung + 1)
    assert shared.client.chat().status_code == 200
    assert shared.restarts["hang"] == before + 1
    assert len(shared.bundles) == min(20, bundles + 1)


def test_the_bundle_is_private_bounded_and_readable(shared: Judged) -> None:
    """`incident.json` says what was judged and on what, without a prompt; nobody else may read any of it."""
    incarnation = shared.ready().status()["engine"]["incarnation"]
    shared.fault("hang_steps")
    with asking(shared.client, messages=[{"role": "user", "content": "a most secret prompt"}]):
        shared.ready(incarnation + 1)
    newest = shared.bundles[-1]
    assert newest.parent.stat().st_mode & 0o777 == newest.stat().st_mode & 0o777 == 0o700
    files = list(newest.iterdir())
    assert {"incident.json", "threads.txt", "meminfo.txt"} <= {file.name for file in files}
    assert all(file.stat().st_mode & 0o777 == 0o600 and file.stat().st_size < 1 << 20 for file in files)
    told = json.loads((newest / "incident.json").read_text())
    assert (told["cause"], told["verdict"], told["incarnation"], told["complete"]) == (
        "stuck",
        "stuck",
        incarnation,
        True,
    )
    assert "has had work for" in told["sentence"]
    assert told["evidence"]["no_progress_s"] >= 1.0
    assert [one["class"] for one in told["open_requests"]] == ["chat"]
    assert 5 <= len(told["samples"]) <= 20
    assert "secret prompt" not in "".join(file.read_text(errors="replace") for file in files)


def test_a_pause_shorter_than_the_waits_changes_nothing(shared: Judged) -> None:
    """A worker that stands still for less than the waits costs nobody anything: every stream completes."""
    before, incarnation = shared.restarts, shared.ready().status()["engine"]["incarnation"]
    [worker] = [process for process in shared.supervisor.descendants() if process.name().startswith("VLLM::Worker")]
    with asking(shared.client, 3, max_tokens=40) as answers:
        shared.wait(lambda status: status["health"]["running"] == 3, "three streams run")
        worker.send_signal(signal.SIGSTOP)
        shared.verdict("suspect")
        worker.send_signal(signal.SIGCONT)
    assert [answer.endswith("data: [DONE]\n") for answer in answers] == [True] * 3
    assert (shared.restarts, shared.status()["engine"]["incarnation"]) == (before, incarnation)


@pytest.mark.parametrize(
    ("fault", "value", "verdict", "reason"),
    [("asleep", "1", "asleep", "asleep"), ("paused", None, "paused", "paused")],
)
def test_what_an_operator_did_closes_admission(
    shared: Judged, fault: str, value: str | None, verdict: str, reason: str
) -> None:
    """An engine asleep or paused refuses with its own reason, for much longer than the waits, and is never restarted."""
    before = shared.ready().restarts
    shared.fault(fault, value)
    shared.verdict(verdict)
    refused = shared.client.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, f"engine_{reason}")
    assert shared.client.get("/readyz").status_code == 503
    shared.wait(lambda status: status["health"]["since_s"] > 1.2, "longer than the waits")
    shared.fault(fault, clear=True)
    shared.wait(lambda status: status["admission"]["open"], "admission open again")
    assert shared.client.chat().status_code == 200
    assert shared.restarts == before


@pytest.mark.parametrize(
    ("fault", "value", "tokens"),
    [
        ("long_prefill", "300ms", 8),
        ("health_status", "503", 20),
        ("health_slow", "10s", 20),
        ("metrics_slow", "10s", 60),
    ],
)
def test_slow_is_not_hung(shared: Judged, fault: str, value: str, tokens: int) -> None:
    """A prefill with flat counts, a /health that says 503 or nothing, a slow /metrics: nobody is cut for any of them."""
    before = shared.ready().restarts
    shared.fault(fault, value)
    try:
        with asking(shared.client, 2, max_tokens=tokens) as answers:
            pass
        assert [answer.endswith("data: [DONE]\n") for answer in answers] == [True] * 2
        assert shared.restarts == before
        assert shared.client.is_ready()
    finally:
        shared.fault(fault, clear=True)


def test_steps_that_finish_nothing_are_no_hang(shared: Judged) -> None:
    """An engine that computes and completes nothing is busy here (and degraded after hours), never restarted."""
    before = shared.ready().restarts
    shared.fault("never_finish")
    with asking(shared.client, max_tokens=20):
        shared.verdict("busy")
        shared.wait(lambda status: status["health"]["since_s"] > 2.0, "twice the waits")
        assert shared.restarts == before
        shared.fault("never_finish", clear=True)


def test_errors_of_clients_are_none_of_the_engine(shared: Judged) -> None:
    """Answers of 400 in a row, for longer than `failing_after`, say nothing against an engine."""
    before = shared.ready().restarts
    shared.fault("inference_status", "400")
    for _ in range(5):
        assert shared.client.chat().status_code == 400
    shared.verdict("idle")
    shared.wait(lambda status: status["health"]["since_s"] > 0.5, "longer than failing_after")
    shared.fault("inference_status", clear=True)
    assert shared.client.chat().status_code == 200
    assert shared.restarts == before


def test_eight_rivals_that_complain_change_nothing(shared: Judged) -> None:
    """Reports are answered with the judgement and recorded; a busy engine goes on, and looks keep their pace."""
    before = shared.ready().restarts
    with asking(shared.client, 4, max_tokens=160) as answers, ThreadPoolExecutor(8) as rivals:
        shared.wait(lambda status: status["health"]["running"] == 4, "four streams run")
        told = list(rivals.map(shared.report, [f"watchdog {number % 8}" for number in range(16)]))
        # On a busy machine the streams may end before the last complaint has come.
        assert told[0]["verdict"] == "busy"
        assert {answer["verdict"] for answer in told} <= {"busy", "idle"}
    assert all(answer.endswith("data: [DONE]\n") for answer in answers)
    assert shared.restarts == before
    shared.verdict("idle")  # a look comes by itself, however many were asked for
    assert len(shared.events("report")) == 16


def test_quit_writes_a_bundle_and_touches_nothing(shared: Judged) -> None:
    """QUIT while streams run: a bundle with its cause, one at a time, and every stream completes."""
    before, number = shared.ready().restarts, len(shared.bundles)
    newest = shared.bundles[-1:]
    with asking(shared.client, 2, max_tokens=40) as answers:
        shared.wait(lambda status: status["health"]["running"] == 2, "two streams run")
        shared.supervisor.signal(signal.SIGQUIT)
        shared.supervisor.signal(signal.SIGQUIT)
        shared.supervisor.until(lambda: shared.bundles[-1:] != newest, within=10.0, what="a bundle")
    path = shared.bundles[-1] / "incident.json"
    shared.supervisor.until(lambda: json.loads(path.read_text())["complete"], within=10.0, what="it is complete")
    told = json.loads(path.read_text())
    assert told["cause"].startswith("asked for by SIGQUIT from pid")
    assert told["verdict"] == "busy"
    assert all(answer.endswith("data: [DONE]\n") for answer in answers)
    assert shared.restarts == before
    assert number <= len(shared.bundles) <= min(20, number + 2)


def test_the_metrics_say_what_was_judged(shared: Judged) -> None:
    """Our part of /metrics has the verdict, the age of the last progress, and the reads by result."""
    shared.ready().verdict("idle")
    text = shared.client.get("/metrics").text
    assert 'vllm_supervisor_verdict{verdict="idle"} 1' in text
    assert 'vllm_supervisor_restarts_total{cause="hang"}' in text
    [line] = [line for line in text.splitlines() if line.startswith('vllm_supervisor_scrapes_total{result="ok"}')]
    assert float(line.split()[-1]) > 0


# -- what needs an engine of its own ---------------------------------------------------------------------------------


@pytest.fixture
def start(account: Account) -> Iterator[Callable[..., Judged]]:
    """Give a call that starts a judged supervisor: (options of serve, more=settings)."""
    with contextlib.ExitStack() as stack:

        def make(*options: str, more: tuple[str, ...] = ()) -> Judged:
            run = contextlib.contextmanager(_start)(account, "--mock-start-time", "0", *options, more=more)
            return stack.enter_context(run)

        yield make


def test_evidence_asked_for_before_the_first_look_has_the_engine_looked_at(start: Callable[..., Judged]) -> None:
    """QUIT soon after ready: the bundle and its line say that the ready engine is idle, not that it starts."""
    waits = ('health.waits=["2h", "2h"]', 'health.waits_slow=["2h", "2h"]', "health.failing_after=2h")
    judged = start(more=("health.interval=1h", *waits))
    assert judged.status()["health"]["source"] == "life of the engine"
    judged.supervisor.signal(signal.SIGQUIT)
    judged.supervisor.until(lambda: judged.events("incident"), within=15.0, what="a bundle")
    told = json.loads((judged.bundles[-1] / "incident.json").read_text())
    assert (told["verdict"], len(told["samples"])) == ("idle", 1)
    assert "[idle, by " in judged.events("incident")[0]["sentence"]


def test_one_hung_engine_among_two(start: Callable[..., Judged]) -> None:
    """With data parallelism one engine that stands still is a hang although the other works on."""
    judged = start("--data-parallel-size", "2", "--max-model-len", "1m").ready()
    with asking(judged.client, 4) as answers:
        judged.wait(lambda status: status["health"]["running"] == 4, "both engines work")
        judged.fault("hang_steps", "1")
        judged.ready(2)
    assert judged.restarts == {"hang": 1}
    budget = judged.status()["restarts"]["budget"]
    assert (budget["used"], budget["stuck"]) == (0, {"max": 1000, "within_s": 21600.0, "used": 1})
    [entry] = judged.events("condemned")
    assert entry["sentence"].startswith("engine 1 has had work for")
    assert all("engine_failed" in answer for answer in answers)


def test_errors_in_a_row_close_admission_for_a_probe_and_its_failure_restarts(start: Callable[..., Judged]) -> None:
    """Answers of 500 without a success: failing, admission closes, the probe fails as well, the engine is replaced."""
    judged = start(more=("health.probe_interval=200ms",)).ready()
    judged.fault("inference_status", "500")
    judged.supervisor.until(
        lambda: judged.client.chat().status_code == 503 or judged.restarts, within=10.0, what="admission closed"
    )
    judged.ready(2)
    assert judged.restarts == {"failing": 1}
    [entry] = judged.events("condemned")
    assert "requests in a row ended in an error of the engine" in entry["sentence"]
    assert judged.client.chat().status_code == 200


def test_stale_gauges_are_settled_by_a_probe(start: Callable[..., Judged]) -> None:
    """Gauges that say "running" with nobody there: a probe is answered, again and again, and nothing is restarted."""
    judged = start("--max-model-len", "1m", more=("health.probe_interval=100ms",)).ready()
    with judged.client.stream(max_tokens=100_000, ignore_eos=True) as stream:
        next(stream)
        judged.wait(lambda status: status["health"]["running"] == 1, "one running")
        judged.fault("stale_gauges")

    def answered() -> bool:
        text = judged.client.get("/metrics").text
        return 'vllm_supervisor_probes_total{outcome="answered"} 3' in text

    judged.supervisor.until(answered, within=10.0, what="three answered probes")
    assert judged.status()["health"]["running"] == 1
    assert judged.restarts == {}


def test_an_idle_engine_that_hangs_is_found_by_its_probe(start: Callable[..., Judged]) -> None:
    """Nobody asks for anything: the probe without an answer proves the hang, and only one was ever sent."""
    judged = start(more=("health.probe_interval=100ms",)).ready()
    judged.fault("hang_first_step")
    judged.ready(2)
    assert judged.restarts == {"hang": 1}
    [entry] = judged.events("condemned")
    assert entry["sentence"].startswith("the server has had work for")
    assert until(lambda: judged.client.chat().status_code == 200, within=5.0, what="served again")


def test_behind_a_balancer_failing_without_probes_ends(start: Callable[..., Judged]) -> None:
    """A client that asks only who is ready finds an engine ready that failed and is well again, without a restart."""
    judged = start().ready()
    judged.fault("inference_status", "500")

    def balanced() -> int | None:
        return judged.client.chat().status_code if judged.client.is_ready() else None

    judged.supervisor.until(lambda: balanced() is None, within=20.0, what="failing takes readiness")
    judged.supervisor.until(lambda: balanced() == 500, within=20.0, what="a trial that fails")
    judged.fault("inference_status", clear=True)
    judged.supervisor.until(lambda: balanced() == 200, within=30.0, what="a trial that succeeds")
    judged.wait(lambda status: status["health"]["verdict"] == "idle", "idle")
    assert judged.restarts == {}


def test_metrics_that_contradict_our_account_are_dropped_and_named(start: Callable[..., Judged]) -> None:
    """Series that stay 0 while requests complete are told of once, stand in the status, and restart nothing."""
    judged = start("--mock-fault", "metrics_zero").ready()
    for _ in range(5):
        assert judged.client.chat().status_code == 200
    status = judged.wait(lambda status: status["health"]["evidence"].get("metrics_dropped"), "the metrics are dropped")
    assert "all counters stay at 0" in status["health"]["evidence"]["metrics_dropped"]
    assert status["health"]["source"] == "front door"
    assert judged.client.chat().status_code == 200
    judged.wait(lambda status: status["health"]["verdict"] == "idle", "idle")
    [said] = judged.events("metrics_dropped")
    assert "contradicts our own account" in said["sentence"]
    assert judged.restarts == {}


def test_a_beacon_that_is_required_and_missing_fails_the_start(account: Account) -> None:
    """`engine.beacon = require` with an engine that reports no steps ends with what to do about it."""
    supervisor = account.start(
        *settings("engine.beacon=require", "restart.on_give_up=exit"),
        "--engine",
        "mock",
        "serve",
        "tiny",
        "--port",
        "0",
    )
    assert supervisor.ends(within=15.0) in {69, 78}, supervisor.words()
    assert "engine.beacon" in supervisor.err.text
