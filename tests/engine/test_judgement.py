"""Judgement of real vLLM. The tests share one engine of four slots and run in the order they stand; the last one ends it.

The waits are 4 s each: far above any step of the tiny model, far below what a person would configure.
"""

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from fakes.judged import CHAT, Judged, settings
from fakes.streams import Streams
from fakes.supervisor_process import Account, chat_body
from fakes.tiny_engine import START, TinyEngine
from vllm_supervisor.adapters.beacon import BeaconReader
from vllm_supervisor.core.samples import BeaconSample

pytestmark = pytest.mark.engine

SHORT = (
    "health.interval=1s",
    'health.waits=["4s", "4s"]',
    'health.waits_slow=["4s", "4s"]',
    "engine.beacon=require",
)
SATURATED_S = 30.0
PROMPT = 1900  # tokens; the tiny model takes two letters for one


@pytest.fixture(scope="module")
def judged(engine: TinyEngine, account: Account) -> Iterator[Judged]:
    """Give the one supervisor of this module, with its engine ready."""
    supervisor, client = engine.serve(
        account,
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--no-enable-prefix-caching"),
        before=settings(*SHORT),
    )
    with client:
        supervisor.until(client.is_ready, within=START, what="ready")
        judged = Judged(account, supervisor, client)
        yield judged.ready()
        judged.close()


def beacon(judged: Judged) -> BeaconSample:
    """Read the engine's own count of its steps, as it stands when nothing runs."""
    incarnation = judged.status()["engine"]["incarnation"]
    [place] = (judged.account.home / f"run/vllm-supervisor/{judged.client.port}").glob(f"engine-*-{incarnation}/steps")
    reader = BeaconReader(place)
    try:

        def resting() -> BeaconSample | None:
            [sample] = reader.read()
            return sample if not (sample.running or sample.waiting or sample.open_tokens) else None

        return judged.supervisor.until(resting, within=10.0, what="an idle beacon")
    finally:
        reader.close()


def engine_url(judged: Judged) -> str:
    """Give the private socket of the running engine as `check` takes it."""
    return "unix:" + judged.status()["engine"]["address"].removeprefix("unix:")


def check(judged: Judged, *options: str) -> tuple[int, str, str]:
    """Run `check` against the bare engine; give its status, the verdict and the sentence."""
    done = judged.account.tool("check", engine_url(judged), "--json", *options, within=60.0)
    found = json.loads(done.stdout)["servers"][0]
    return done.returncode, found["verdict"], found["sentence"]


def test_the_verdict_rests_on_the_beacon(judged: Judged) -> None:
    """Status says that an engine reports its true steps, and that the verdict rests on them."""
    status = judged.verdict("idle")
    assert status["engine"]["beacon"] is True
    assert status["health"]["source"] == "beacon"
    assert check(judged, "--no-probe")[:2] == (0, "idle")


def test_steps_against_a_known_count(judged: Judged) -> None:
    """One answer of 50 tokens to a short prompt is 50 steps that worked, and the tokens are all of its tokens."""
    before = beacon(judged)
    answer = judged.client.chat(max_tokens=50, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 50
    after = beacon(judged)
    assert after.worked - before.worked == 50
    # The last token is put out and never computed on.
    assert after.tokens - before.tokens == answer["usage"]["prompt_tokens"] + 49
    assert after.events - before.events == 2


def test_a_chunked_prefill_is_progress(judged: Judged) -> None:
    """A prompt of 1,900 tokens in chunks of 128 is 15 steps or more, and not one moment of suspicion."""
    before = beacon(judged)
    answer = judged.client.chat(max_tokens=1, messages=[{"role": "user", "content": "aa" * PROMPT}]).json()
    after = beacon(judged)
    tokens = answer["usage"]["prompt_tokens"]
    assert tokens >= PROMPT
    assert after.worked - before.worked == -(-tokens // 128)
    assert not judged.events("verdict")


def test_saturation_is_no_hang(judged: Judged) -> None:
    """64 clients on four slots, looked at every second: no restart, no probe, nobody is cut, and /readyz stays 200."""
    probes = probes_sent(judged)
    counts = saturate(judged, SATURATED_S)
    assert set(counts) == {200}, counts
    assert counts[200] > 64
    status = judged.status()
    assert status["restarts"]["total"] == 0
    assert probes_sent(judged) == probes
    assert {entry["sentence"].split(":")[0] for entry in judged.events("verdict")} <= {"busy", "idle"}
    assert status["requests"]["failed"] == 0


def saturate(judged: Judged, seconds: float) -> Counter[int]:
    """Keep 64 clients asking for `seconds`; give how often each status came. Meanwhile the verdict is busy."""
    counts: Counter[int] = Counter()
    end = time.monotonic() + seconds

    def ask() -> None:
        with httpx.Client(base_url=judged.client.url, timeout=120.0, trust_env=False) as client:
            while time.monotonic() < end:
                counts[client.post(CHAT, json=chat_body(max_tokens=64, ignore_eos=True)).status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads:
        thread.start()
    busy = judged.verdict("busy")
    assert check(judged)[:2] == (0, "busy")
    assert busy["health"]["sentence"].startswith("busy and healthy: ")
    judged.wait(lambda status: status["health"]["waiting"] and status["health"]["steps_per_s"], "requests wait")
    assert judged.client.is_ready()
    for thread in threads:
        thread.join(seconds + 120.0)
    return counts


def probes_sent(judged: Judged) -> float:
    """Give how many probes have ended or been withdrawn."""
    lines = judged.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm_supervisor_probes_total{"))


def test_a_request_the_engine_still_has_keeps_its_place(judged: Judged) -> None:
    """A client leaves while the worker stands still: its place is held until the scheduler has let the request go."""
    worker = judged.supervisor.named("VLLM::Worker")
    with judged.client.stream(max_tokens=20_000, ignore_eos=True) as stream:
        next(stream)
        worker.send_signal(signal.SIGSTOP)
    try:
        judged.wait(lambda status: not status["admission"]["in_flight"], "the exchange has ended")
        assert judged.status()["admission"]["held"] == 1
    finally:
        worker.send_signal(signal.SIGCONT)
    judged.wait(lambda status: not status["admission"]["held"], "the place is given back")
    judged.verdict("idle")


def test_a_stop_shorter_than_the_waits_changes_nothing(judged: Judged) -> None:
    """A worker that stands still and goes on within the waits: suspect for a moment, every stream completes."""
    worker = judged.supervisor.named("VLLM::Worker")
    with Streams(judged.client.port, 4, max_tokens=6000, ignore_eos=True) as streams:
        worker.send_signal(signal.SIGSTOP)
        suspect = judged.verdict("suspect")
        worker.send_signal(signal.SIGCONT)
    assert "a decode step of 4 tokens has been open for" in suspect["health"]["sentence"]
    assert [seen.complete for seen in streams.seen] == [True] * 4
    assert judged.status()["restarts"]["total"] == 0
    judged.verdict("idle")


def test_a_hang_is_proven_documented_and_ended(judged: Judged) -> None:
    """The worker stands still: stuck after the waits, a bundle, every client told, and a new engine that serves.

    Meanwhile /health of the bare engine says 200, and `check` finds the hang from outside.
    """
    worker = judged.supervisor.named("VLLM::Worker")
    prompt = [{"role": "user", "content": "a most secret prompt"}]
    with Streams(judged.client.port, 4, max_tokens=20_000, ignore_eos=True, messages=prompt) as streams:
        stopped = time.monotonic()
        worker.send_signal(signal.SIGSTOP)
        code, verdict, sentence = check(judged, "--wait", "2s", "--wait", "2s")
        assert (code, verdict) == (2, "stuck"), sentence
        judged.wait(lambda status: status["restarts"]["by_cause"] == {"hang": 1}, "restarted for a hang", within=60.0)
        took = time.monotonic() - stopped
    assert took < 40.0, took
    assert all("engine_failed" in seen.data[-1] and "[DONE]" not in seen.data for seen in streams.seen)
    [condemned] = judged.events("condemned")
    # By its open step or by the door's own account, whichever proof is complete at the first look after the waits.
    assert condemned["sentence"].startswith(("the engine has had work for ", "the server has had work for "))
    [bundle] = judged.bundles
    told = json.loads((bundle / "incident.json").read_text())
    assert (told["cause"], told["verdict"], told["evidence"]["source"]) == ("stuck", "stuck", "beacon")
    assert told["evidence"]["steps_begun"] > told["evidence"]["steps_ended"]
    assert len(told["open_requests"]) == 4
    threads = (bundle / "threads.txt").read_text()
    assert "VLLM::Worker" in threads
    assert {path.stat().st_mode & 0o777 for path in bundle.iterdir()} == {0o600}
    assert "secret prompt" not in "".join(path.read_text(errors="replace") for path in bundle.iterdir())
    judged.supervisor.until(judged.client.is_ready, within=START, what="ready again")
    assert judged.client.chat().status_code == 200
    judged.supervisor.signal(signal.SIGTERM)
    judged.supervisor.ends(within=60.0)
    judged.account.expect_nothing_left()
