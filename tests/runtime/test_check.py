"""`check` against servers of every kind: the right sentence and exit status for each."""

import json
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from click.testing import CliRunner
from trio.testing import trio_test

from fakes.scripted_http import Script, Seen, serving
from vllm_supervisor.cli.check import check
from vllm_supervisor.cli.main import main
from vllm_supervisor.core.address import TcpAddress, UnixAddress
from vllm_supervisor.core.check import Checked, Target, target, with_port, worst
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.words import Verdict
from vllm_supervisor.runtime.check import CheckOptions, check_all

SHORT = CheckOptions(short=0.05, again=0.01, read_limit=0.3, look_limit=0.6)
WAITS = CheckOptions(waits=(0.2, 0.2), short=0.05, again=0.01, read_limit=0.3)


class Server:
    """A server that counts like vLLM: every field may be changed while it is being read."""

    def __init__(self) -> None:
        self.running, self.waiting = 0, 0
        self.moves = 0.0  # output tokens more at each read
        self.tokens = 100.0
        self.starts = [1_700_000_000.0]
        self.health: object = (200, "")
        self.work: object = (200, '{"choices": []}')
        self.metrics: object = None
        self.awake = 1
        self.paused: object = (404, "")
        self.reads = 0

    def __call__(self, seen: Seen) -> object:
        """Answer one request."""
        if seen.path == "/metrics":
            if self.metrics is not None:
                return self.metrics
            start = self.starts[self.reads % len(self.starts)]
            self.reads += 1
            self.tokens += self.moves
            labels = '{engine="0",model_name="m"}'
            return 200, (
                f"vllm:num_requests_running{labels} {self.running}\n"
                f"vllm:num_requests_waiting{labels} {self.waiting}\n"
                f"vllm:generation_tokens_total{labels} {self.tokens}\n"
                f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {self.awake}\n'
                f"process_start_time_seconds {start}\n"
            )
        if seen.path == "/health":
            return self.health
        if seen.path == "/is_paused":
            return self.paused
        if seen.path == "/v1/models":
            return 200, '{"data": [{"id": "m"}]}'
        if seen.path == "/v1/completions":
            return (405, "") if seen.method == "GET" else self.work
        return 404, ""


async def never(_seen: Seen) -> object:
    """Give no answer, ever."""
    await trio.sleep_forever()
    raise AssertionError


def posts(script: Script) -> int:
    """Count the requests that were more than reads."""
    return script.count("POST")


async def run(answer: Callable[[Seen], object], options: CheckOptions = SHORT) -> tuple[Checked, Script]:
    """Check one server that answers with `answer`."""
    with trio.fail_after(20):
        async with serving(answer) as (script, address):
            found, _kept = await check_all([target(f"http://127.0.0.1:{address.port}")], options, None)
    return found[0], script


@trio_test
async def test_idle() -> None:
    """An idle server is asked for one token, and says so in a sentence."""
    found, script = await run(Server())
    assert (found.verdict, found.exit, posts(script)) == (Verdict.IDLE, 0, 1)
    assert "a one-token request was answered in" in found.sentence
    assert script.seen[-1].headers["x-request-id"].startswith("vsup-probe-check-")


@trio_test
async def test_idle_without_a_probe() -> None:
    """With --no-probe an idle server gets reads only."""
    found, script = await run(Server(), CheckOptions(probe=False, short=0.05))
    assert (found.verdict, posts(script)) == (Verdict.IDLE, 0)


@pytest.mark.parametrize("options", [SHORT, WAITS], ids=["short", "waits"])
@trio_test
async def test_busy(options: CheckOptions) -> None:
    """A server with progress between two reads is busy, known at once, and gets nothing but reads."""
    server = Server()
    server.running, server.waiting, server.moves = 12, 3, 10.0
    found, script = await run(server, options)
    assert (found.verdict, found.exit, posts(script), server.reads) == (Verdict.BUSY, 0, 0, 2)
    assert found.sentence.startswith("busy and healthy: 12 running, 3 waiting, ")


@trio_test
async def test_stopped() -> None:
    """A server with work and no progress is suspect after two short reads, stuck after explicit waits; never probed."""
    server = Server()
    server.running = 1
    short, script = await run(server)
    assert (short.verdict, short.exit, posts(script)) == (Verdict.SUSPECT, 1, 0)
    assert "give --wait S --wait S" in short.sentence
    found, script = await run(server, WAITS)
    assert (found.verdict, found.exit, posts(script)) == (Verdict.STUCK, 2, 0)
    assert found.sentence.startswith("the engine has had work for")


@trio_test
async def test_an_idle_server_that_does_not_answer() -> None:
    """One token that does not come makes an idle server suspect, and stuck when the waits were asked for."""
    server = Server()
    server.work = None

    def answer(seen: Seen) -> object:
        return never(seen) if seen.method == "POST" else server(seen)

    assert (await run(answer))[0].verdict is Verdict.SUSPECT
    found, script = await run(answer, WAITS)
    assert (found.verdict, posts(script)) == (Verdict.STUCK, 1)


@trio_test
async def test_killed() -> None:
    """An address where nobody listens is unreachable."""
    async with serving(Server()) as (_script, address):
        pass
    found, _kept = await check_all([target(f"http://127.0.0.1:{address.port}")], SHORT, None)
    assert (found[0].verdict, found[0].exit) == (Verdict.UNREACHABLE, 2)


@trio_test
async def test_restarted_between_the_reads() -> None:
    """A new start time is said, nothing is compared, and an answer settles it."""
    server = Server()
    server.starts = [1.0, *[2.0] * 20]
    found, script = await run(server)
    assert (found.verdict, found.exit, found.restarted, posts(script)) == (Verdict.IDLE, 0, True, 1)
    assert found.sentence.startswith("restarted between two reads; idle")
    server.reads, server.running = 0, 2
    found, script = await run(server)
    assert (found.verdict, found.restarted, posts(script)) == (Verdict.SUSPECT, True, 0)


@trio_test
async def test_behind_an_alternating_proxy() -> None:
    """Start times that alternate are a proxy's doing: unjudgeable, and nothing is sent."""
    server = Server()
    server.starts = [1.0, 2.0]
    found, script = await run(server)
    assert (found.verdict, found.exit, posts(script)) == (Verdict.UNJUDGEABLE, 3, 0)
    assert "check the backends directly" in found.sentence


@pytest.mark.parametrize("metrics", [(404, ""), (500, ""), (200, ""), (200, "python_info 1\n")])
@trio_test
async def test_without_metrics(metrics: object) -> None:
    """Without an engine's series nothing can be judged, and nothing is sent to find out."""
    server = Server()
    server.metrics = metrics
    found, script = await run(server, WAITS)
    assert (found.verdict, found.exit, posts(script)) == (Verdict.UNJUDGEABLE, 3, 0)


@trio_test
async def test_a_server_that_accepts_and_says_nothing() -> None:
    """No answer in time is a suspicion: saturated and stopped look alike from here."""
    found, script = await run(never)
    assert (found.verdict, found.exit, posts(script)) == (Verdict.SUSPECT, 1, 0)


@pytest.mark.parametrize("silent", ["every path", "the request for one token"])
@trio_test
async def test_a_plain_look_has_one_deadline(silent: str) -> None:
    """However many reads and the probe get no answer, their times do not add up, and the verdict is what it was."""
    server = Server()

    def answer(seen: Seen) -> object:
        return never(seen) if silent == "every path" or seen.method == "POST" else server(seen)

    began = time.monotonic()
    found, _script = await run(answer, CheckOptions(short=0.05, look_limit=1.0))
    assert time.monotonic() - began < 1.5
    assert (found.verdict, found.exit) == (Verdict.SUSPECT, 1)
    words = "no whole answer in time" if silent == "every path" else "one-token request"
    assert words in found.sentence


@trio_test
async def test_asleep_and_paused() -> None:
    """What an operator did on purpose is a warning, and gets no probe."""
    server = Server()
    server.awake = 0
    found, script = await run(server, WAITS)
    assert (found.verdict, found.exit, posts(script)) == (Verdict.ASLEEP, 1, 0)
    server.awake, server.paused, server.waiting = 1, (200, '{"is_paused": true}'), 4
    found, script = await run(server, WAITS)
    assert (found.verdict, found.exit, posts(script)) == (Verdict.PAUSED, 1, 0)


@pytest.mark.parametrize(
    ("health", "metrics", "verdict"),
    [
        ((503, ""), None, Verdict.DEAD),
        ((503, ""), (503, ""), Verdict.SUSPECT),
        ((503, '{"status": "x", "phase": "running", "engine": "starting", "reason": "loads"}'), None, Verdict.STARTING),
        ((503, '{"status": "x", "phase": "running", "engine": "ready", "reason": "draining"}'), None, Verdict.SUSPECT),
        ((503, '{"status": "x", "phase": "running", "engine": "parked", "reason": "gave up"}'), None, Verdict.DEAD),
        ((503, '{"status": "x", "phase": "running", "engine": "parked", "reason": "x"}'), (503, ""), Verdict.DEAD),
        ((503, '{"status": "x", "phase": "running", "engine": "unkillable", "reason": "pid 7"}'), None, Verdict.DEAD),
        ((200, '{"status": "ok", "phase": "running", "engine": "parked", "reason": "gave up"}'), None, Verdict.DEAD),
        ((200, '{"status": "ok", "phase": "running", "engine": "ready", "reason": ""}'), None, Verdict.IDLE),
        ((404, ""), None, Verdict.IDLE),
    ],
)
@trio_test
async def test_what_health_says(health: object, metrics: object, verdict: Verdict) -> None:
    """A dead engine, one that is being scaled, a supervisor that is not ready and one that gave up are told apart."""
    server = Server()
    server.health, server.metrics = health, metrics
    assert (await run(server))[0].verdict is verdict


@pytest.mark.parametrize(
    ("work", "verdict", "part"),
    [
        ((500, ""), Verdict.FAILING, "gave status 500"),
        (b"", Verdict.FAILING, "no whole answer"),
        ((401, ""), Verdict.IDLE, "the key is not accepted"),
        ((400, ""), Verdict.IDLE, "no endpoint takes one"),
    ],
)
@trio_test
async def test_how_a_probe_may_end(work: object, verdict: Verdict, part: str) -> None:
    """Errors of the engine are failing; what is not possible leaves the server idle."""
    server = Server()
    server.work = work
    found, _script = await run(server)
    assert found.verdict is verdict
    assert part in found.sentence


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ((200, '{"data": [{"id": "a"}, {"id": "b"}]}'), 0),
        ((200, "hello"), 3),
        ((401, ""), 3),
        ((502, ""), 2),
        (b"", 1),
    ],
)
@trio_test
async def test_a_proxy_is_asked_for_its_models_alone(answer: object, status: int) -> None:
    """With --proxy one read of /v1/models decides, and no engine is judged."""
    found, script = await run(lambda _seen: answer, CheckOptions(proxy=True))
    assert found.exit == status
    assert [seen.path for seen in script.seen] == ["/v1/models"]


@trio_test
async def test_a_remembered_reading_spares_the_wait() -> None:
    """With remembered readings each run reads once, and a hang is found over several runs."""
    server = Server()
    server.running = 1
    options = CheckOptions(waits=(0.2, 0.2), short=0.05, read_limit=0.3)
    with trio.fail_after(20):
        async with serving(server) as (_script, address):
            servers, verdicts, reads = [target(f"http://127.0.0.1:{address.port}")], [], []
            kept: dict[str, object] = {}
            for _ in range(6):
                before = server.reads
                found, kept = await check_all(servers, options, json.loads(json.dumps(kept)))
                verdicts.append(found[0].verdict)
                reads.append(server.reads - before)
                await trio.sleep(0.1)  # what a monitor leaves between two runs, in small
    assert verdicts[0] in {Verdict.BUSY, Verdict.SUSPECT}
    assert verdicts[-1] is Verdict.STUCK
    assert reads == [2, 1, 1, 1, 1, 1]


@trio_test
async def test_several_servers_are_judged_each() -> None:
    """Each server gets its own finding, and the worst decides."""
    hung = Server()
    hung.running = 1
    with trio.fail_after(20):
        async with serving(Server()) as (_one, first), serving(hung) as (_two, second):
            targets = [target(f"http://127.0.0.1:{address.port}") for address in (first, second)]
            found, _kept = await check_all(targets, WAITS, None)
    assert [one.verdict for one in found] == [Verdict.IDLE, Verdict.STUCK]
    assert worst(one.exit for one in found) == 2


@pytest.mark.parametrize(("exits", "decides"), [([0, 0], 0), ([0, 3], 3), ([3, 1], 1), ([1, 3, 2], 2)])
def test_the_worst_decides(exits: list[int], decides: int) -> None:
    """Critical before warning before unknown before fine, as monitoring plugins have it."""
    assert worst(exits) == decides


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://gpu1:8000", (TcpAddress("gpu1", 8000), "gpu1:8000", "", False)),
        ("gpu1:8000", (TcpAddress("gpu1", 8000), "gpu1:8000", "", False)),
        ("https://api.example/llm/v1/", (TcpAddress("api.example", 443), "api.example", "/llm", True, True)),
        ("http://[::1]:8000/v1/models", (TcpAddress("::1", 8000), "[::1]:8000", "", False)),
        ("http://gpu1/metrics", (TcpAddress("gpu1", 80), "gpu1", "", False, True)),
        ("unix:/run/engine.sock", (UnixAddress("/run/engine.sock"), "localhost", "", False)),
    ],
)
def test_urls(url: str, wanted: tuple[object, ...]) -> None:
    """What people paste names a server: with and without scheme, path and port."""
    assert target(url) == Target(url, *wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "http://", "http://x:99999", "http://x:0", "unix:relative", "http://user:secret@x:1", "http://x/a%0ab"],
)
def test_urls_that_name_nothing(url: str) -> None:
    """A URL that cannot be checked is a usage error that never repeats a password."""
    with pytest.raises(UsageError) as told:
        target(url)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("url", "added"),
    [
        ("127.0.0.1", "; no port was given, so 127.0.0.1:80 was asked"),
        ("https://[::1]/v1", "; no port was given, so [::1]:443 was asked"),
        ("127.0.0.1:8000", ""),
        ("unix:/x", ""),
    ],
)
def test_a_port_that_nobody_gave_is_named(url: str, added: str) -> None:
    """Who forgot the port reads which one was asked; a server that is well needs no such words."""
    found = Checked(url, Verdict.UNREACHABLE, "nobody listens at this address")
    assert with_port(found, target(url)).sentence == found.sentence + added
    assert with_port(replace(found, verdict=Verdict.IDLE), target(url)).sentence == found.sentence


@trio_test
async def test_the_port_is_named_in_what_is_found() -> None:
    """The words about the port reach the finding."""
    async with serving(Server()) as (_script, address):
        pass
    bare = replace(target("http://127.0.0.1"), address=address)
    found, _kept = await check_all([bare], SHORT, None)
    assert found[0].sentence.endswith(f"; no port was given, so {address} was asked")


@pytest.mark.parametrize("words", ["foo://x", "http://x --no-such-option", "", "http://x --wait 1s"])
def test_a_wrong_command_line_says_nothing_on_standard_output(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is status 2 as with every command, and told from CRITICAL by an empty standard output."""
    assert main(["check", *words.split()]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)


def test_the_command(tmp_path: Path) -> None:
    """The command prints a line or JSON, keeps its state file private, and ends with the plugin's status."""
    free = "unix:" + str(tmp_path / "nobody.sock")
    told = CliRunner().invoke(check, [free])
    assert told.exit_code == 2
    assert told.output == f"CRITICAL - {free}: nobody listens at this address: not saturated, and not idle\n"
    state = tmp_path / "state"
    told = CliRunner().invoke(check, [free, "--json", "--state", str(state)])
    answer = json.loads(told.output)
    assert (answer["exit"], answer["servers"][0]["verdict"]) == (2, "unreachable")
    assert state.stat().st_mode & 0o777 == 0o600
    assert math.isclose(len(json.loads(state.read_text())["servers"]), 1)
    assert CliRunner().invoke(check, [free, "--state", str(state)]).exit_code == 2


@pytest.mark.parametrize("arguments", [["--wait", "5"], ["--wait", "a", "--wait", "b"], ["--state", "/nowhere/x"]])
def test_wrong_usage_of_the_command(tmp_path: Path, arguments: list[str]) -> None:
    """One wait alone, a wait that is no duration, and a state file in no directory are usage errors."""
    told = CliRunner().invoke(check, [f"unix:{tmp_path}/x", *arguments])
    assert isinstance(told.exception, UsageError)


AUTHORITY = trustme.CA()


def _context(*names: str, wants_ours: bool = False, expired: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    when = datetime.now(UTC) - timedelta(days=2) if expired else None
    AUTHORITY.issue_cert(*names, not_after=when).configure_cert(context)
    if wants_ours:
        context.verify_mode = ssl.CERT_REQUIRED
        AUTHORITY.configure_trust(context)
    return context


@pytest.mark.parametrize("proxy", [False, True], ids=["engine", "proxy"])
@pytest.mark.parametrize(
    ("scheme", "tls", "trusted", "words"),
    [
        ("https", {"names": ("127.0.0.1",)}, False, "SSL_CERT_FILE=CA.pem vllm-supervisor check"),
        ("https", {"names": ("gpu.example",)}, True, "for another name"),
        ("https", {"names": ("127.0.0.1",), "expired": True}, True, "out of date"),
        ("https", {"names": ("127.0.0.1",), "wants_ours": True}, True, "wants a certificate of its client"),
        ("https", None, True, "ask by http://"),
        ("http", {"names": ("127.0.0.1",)}, True, "ask by https://"),
        ("http", {"names": ("127.0.0.1",), "wants_ours": True}, True, "ask by https://"),
    ],
)
@trio_test
async def test_certificates_and_schemes_say_nothing_of_the_engine(  # noqa: PLR0917
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    scheme: str,
    tls: dict[str, Any] | None,
    trusted: bool,
    words: str,
    proxy: bool,
) -> None:
    """What stands between http and https is UNKNOWN with the remedy, never an engine that is saturated or down."""
    if trusted:
        AUTHORITY.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    options = dict(tls or {})
    context = None if tls is None else _context(*options.pop("names"), **options)
    with trio.fail_after(20):
        async with serving(Server(), context) as (script, address):
            url = f"{scheme}://127.0.0.1:{address.port}"
            found, _kept = await check_all([target(url)], replace(SHORT, proxy=proxy, read_limit=5, look_limit=5), None)
    assert (found[0].verdict, found[0].exit) == (Verdict.UNJUDGEABLE, 3)
    assert words in found[0].sentence
    assert posts(script) == 0


@trio_test
async def test_a_trusted_certificate_is_judged_as_usual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the authority in SSL_CERT_FILE a private certificate is as good as any."""
    AUTHORITY.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    async with serving(Server(), _context("127.0.0.1")) as (_script, address):
        found, _kept = await check_all([target(f"https://127.0.0.1:{address.port}")], SHORT, None)
    assert found[0].verdict is Verdict.IDLE


@trio_test
async def test_a_server_that_only_breaks_off_is_not_taken_for_tls() -> None:
    """Without a TLS handshake that leads anywhere a broken answer stays one."""
    server = Server()
    server.health = server.metrics = server.paused = b""
    found, _script = await run(server)
    assert "TLS" not in found.sentence
