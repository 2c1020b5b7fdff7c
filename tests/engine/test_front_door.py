"""The front door before real vLLM: the same bytes as without it, real clients, clients that vanish, tunnels, dangers.

The tests share one engine, started with as many of its routes as there are, and run in the order they stand; the last
one stops it.
"""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import parser

from fakes.books import Books
from fakes.drain_scenario import Watcher
from fakes.exchanges import EXCHANGES, KEY, ROOT, Exchange, head, post
from fakes.supervisor_process import Account, Client, Supervisor, until
from fakes.tiny_engine import START, TinyEngine
from fakes.vanishing import crowd, let_vanish
from fakes.wire import Answer, ask, ask_on, connect
from vllm_supervisor.core.cors import Cors
from vllm_supervisor.core.routes import Kind, Route, Router

pytestmark = pytest.mark.engine

FAKES = Path(__file__).parents[1] / "fakes"
CROWD = 200
BUDGET = 2.0  # seconds, of the drain at the end

# Everything that opens routes, and nothing that makes two answers to one question differ.
OPTIONS = (
    *("--api-key", KEY, "--root-path", ROOT, "--enable-request-id-headers", "--enable-scale-out"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-tokenizer-info-endpoint"),
    *("--allowed-origins", '["https://app.test"]'),
    *("--no-enable-prefix-caching", "--middleware", "echo_socket.EchoSocket", "--middleware", "told_client.ToldClient"),
)
ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "PYTHONPATH": str(FAKES / "in_engine"),
}
# A probe of ours beside a question would be computed in one batch with it, and round differently.
SETS = ("health.probe_interval=0", "health.interval=200ms", f"drain.budget={BUDGET}", "drain.documentation=1s")

# What no two answers have in common, whoever asks: ids and times of vLLM's own making.
OWN_FIELDS = ("date", "x-request-id")
OWN_VALUES = re.compile(rb'"(id|item_id|request_id|created|created_at|completed_at)": ?("[^"]*"|[\d.]+)')


@dataclass
class Served:
    """The running supervisor, its public port, and the private socket of its engine."""

    account: Account
    supervisor: Supervisor
    client: Client
    watcher: Watcher
    socket: str

    @property
    def port(self) -> int:
        """The public port."""
        return self.client.port

    def gauge(self, name: str) -> float:
        """Read a gauge from the engine itself."""
        text = ask(self.socket, head("GET", "/metrics")).body.decode()
        return float(re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[0])

    def sdk(self, engine: TinyEngine, script: str) -> tuple[str, ...]:
        """Give the command line of a client script that runs in vLLM's environment."""
        return (str(engine.python), "-W", "error", str(FAKES / "sdk" / script), self.client.url, KEY)


@pytest.fixture(scope="module")
def served(engine: TinyEngine) -> Iterator[Served]:
    """Give the one supervisor of this module, ready."""
    with Account({**engine.env, **ENV}) as account:
        before = tuple(word for one in SETS for word in ("--set", one))
        supervisor, client = engine.serve(account, *OPTIONS, before=before)
        with client:
            supervisor.until(client.is_ready, within=START, what="ready")
            watcher = Watcher(account)
            yield Served(
                account, supervisor, client, watcher, watcher.status()["engine"]["address"].removeprefix("unix:")
            )


# -- the same bytes ----------------------------------------------------------------------------------------------------


def masked(answer: Answer, exchange: Exchange) -> Answer:
    """Take out what differs between any two answers of vLLM itself."""
    names = OWN_FIELDS[:1] if exchange.own_id else OWN_FIELDS
    body = OWN_VALUES.sub(rb'"\1": "*"', answer.body)
    fields = [
        ("content-length", "*") if field[0] == "content-length" and body != answer.body else field
        for field in answer.without(*names)
    ]
    return Answer(answer.status, answer.reason, fields, body)


def without_ours(answer: Answer, bare: Answer) -> Answer:
    """Take out what the front door adds."""
    added = {"x-ledger-id", "x-accel-buffering"} - {name for name, _ in bare.fields}
    return Answer(answer.status, answer.reason, answer.without(*added), answer.body)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_the_answer_is_bare_vllms(exchange: Exchange, served: Served) -> None:
    """Asked on its own socket and through the front door, the same engine gives the same status, fields and body.

    vLLM joins tokens into one event when it is late itself, so that two of its streams may differ: another pair is asked.
    """
    streamed = b'"stream": true' in exchange.request
    for _ in range(5 if streamed else 1):
        bare, through = ask(served.socket, exchange.request), ask(served.port, exchange.request)
        same = masked(without_ours(through, bare), exchange) == masked(bare, exchange)
        if same:
            break
    assert masked(without_ours(through, bare), exchange) == masked(bare, exchange)
    assert bare.status == exchange.status, bare.body[:300]
    assert (through.field("x-ledger-id") is not None) == exchange.gated
    if bare.field("content-type") == "text/event-stream; charset=utf-8":
        assert through.field("x-accel-buffering") == (bare.field("x-accel-buffering") or "no")


def test_one_connection_serves_them_all(served: Served) -> None:
    """The whole table over one connection: each answer ends where it ends, and the next begins."""
    with connect(served.port) as sock:
        statuses = [(one.name, ask_on(sock, one.request).status) for one in EXCHANGES]
    assert statuses == [(one.name, one.status) for one in EXCHANGES]


def test_health_and_metrics_need_no_key(served: Served) -> None:
    """What watches over a server is answered without its key, with and without the root path, as by bare vLLM."""
    for path in ("/health", ROOT + "/health", "/ping", "/metrics"):
        for address in (served.socket, served.port):
            asked = head("GET", path, "X-Forwarded-For: 127.0.0.1", key=None)  # a middleware of the user's wants it
            assert ask(address, asked).status == 200, (address, path)


@pytest.mark.parametrize(
    ("fields", "host", "scheme"),
    [
        ((), "127.0.0.1", "http"),
        (("X-Forwarded-For: 198.51.100.9", "X-Forwarded-Proto: https"), "198.51.100.9", "https"),
        (("X-Forwarded-For: 6.6.6.6, 198.51.100.9",), "198.51.100.9", "http"),
    ],
)
def test_the_engine_sees_the_client(fields: tuple[str, ...], host: str, scheme: str, served: Served) -> None:
    """A middleware reads the client's address and scheme as if the client, or its local proxy, had come to vLLM itself."""
    assert json.loads(ask(served.port, head("GET", "/client", *fields)).body) == {"host": host, "scheme": scheme}


def test_our_preflights_are_bare_vllms(served: Served) -> None:
    """What we answer to a preflight while the engine cannot is what the engine answers while it can."""
    asked = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type")
    for origin in ("https://app.test", "https://evil.test"):
        request = head("OPTIONS", "/v1/completions", f"Origin: {origin}", *asked)
        bare = ask(served.socket, request)
        ours = Cors(("https://app.test",)).preflight(b"OPTIONS", request)
        assert ours is not None
        assert (bare.status, bare.body) == ours[:2]
        ours_said = dict(line.lower().split(": ", 1) for line in ours[2].decode().splitlines())
        bare_said = {name: value.lower() for name, value in bare.fields if name.startswith("access-control-")}
        methods = "access-control-allow-methods"  # of "*" Starlette makes those that its version knows
        assert set(ours_said.pop(methods).split(", ")) <= set(bare_said.pop(methods).split(", "))
        assert ours_said.pop("vary")
        assert ours_said == bare_said


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0"])
def test_metrics_are_one_page(accept: str, served: Served) -> None:
    """Whatever a scraper prefers, the page with ours in it is what its media type says (vLLM 0.32 knows the plain one)."""
    page = ask(served.port, head("GET", "/metrics", f"Accept: {accept}"))
    assert page.field("content-type").startswith("text/plain; version=")
    names = {family.name for family in parser.text_string_to_metric_families(page.body.decode())}
    assert {"vllm:num_requests_running", "vllm_supervisor_build_info", "vllm_supervisor_requests_accepted"} <= names


# -- real clients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["openai_sdk.py", "anthropic_sdk.py"])
def test_the_official_clients_work_through_it(script: str, served: Served, engine: TinyEngine) -> None:
    """Whole, streamed, several at once, tools and errors: the packages find what they expect of vLLM."""
    engine.client(served.account, *served.sdk(engine, script))


def test_curl_sends_a_large_body_after_100_continue(served: Served, tmp_path: Path) -> None:
    """A body over 1 MB waits for 100 Continue, passes whole, and its answer is the one that the bare engine gives."""
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": "tiny", "prompt": "Hello, you there. " * 70_000}), encoding="utf-8")
    assert body.stat().st_size > 1_000_000
    curl = ("curl", "--silent", "--show-error", "--verbose", "--max-time", "60", "--expect100-timeout", "50")
    what = ("-H", "Expect: 100-continue", "-H", "Content-Type: application/json", "--data-binary", f"@{body}")
    said, got = [], []
    for where in (("--unix-socket", served.socket, "http://tiny.test"), ("--noproxy", "*", served.client.url)):
        done = subprocess.run(
            [*curl, *what, *where[:-1], f"{where[-1]}/tokenize"], capture_output=True, timeout=120.0, check=False
        )
        said.append(done.stderr.decode(errors="replace"))
        got.append(done.stdout)
        assert "HTTP/1.1 100 Continue" in said[-1], said[-1][-2000:]
        assert "HTTP/1.1 200 OK" in said[-1], said[-1][-2000:]
    assert got[0] == got[1]
    assert json.loads(got[1])["count"] > 100_000


# -- clients that vanish -----------------------------------------------------------------------------------------------


def test_clients_that_vanish_leave_nothing_behind(served: Served) -> None:
    """200, by FIN and reset, at any moment: within 2 s nothing runs and no place is held; all have their account."""
    before = served.watcher.status()["requests"]
    answered = let_vanish(crowd(CROWD, seed=2032), served.port)

    def left() -> dict[str, float]:
        running, waiting = served.gauge("num_requests_running"), served.gauge("num_requests_waiting")
        return {"running": running, "waiting": waiting, "in_flight": served.watcher.status()["admission"]["in_flight"]}

    until(
        lambda: not any(left().values()),
        within=2.0,
        what="an idle engine and no place held",
        else_say=lambda: f"{left()}",
    )
    now = served.watcher.status()["requests"]
    counts = {name: now[name] - before[name] for name in now}
    assert counts["accepted"] == counts["completed"] + counts["cancelled"]
    assert (counts["failed"], counts["open"], counts["rejected"]) == (0, 0, 0)
    assert answered <= counts["accepted"] < CROWD
    assert counts["completed"] > 0
    served.supervisor.until(
        lambda: served.watcher.status()["executions"]["running"] == 0, within=10.0, what="the end of every execution"
    )
    assert served.watcher.status()["executions"]["unknown"] == 0
    assert ask(served.port, EXCHANGES[0].request).status == 200


# -- dangerous paths ---------------------------------------------------------------------------------------------------

SPELLINGS = (
    *("/{}", "//{}", "/./{}", "/x/../{}", "/{}/", "/{}?level=1", "/%2e/{}", "/x/%2E%2E/{}", "/x%2f..%2f{}", "/{};a=b"),
    *(ROOT + "/{}", ROOT.upper() + "//{}", ROOT + ROOT + "/{}", "/x/.." + ROOT + "/{}"),
)


def changing_routes(served: Served) -> list[tuple[str, str]]:
    """Give method and path of each route of the engine that is not just read."""
    routes = json.loads(ask(served.socket, head("GET", "/openapi.json")).body)["paths"]
    return [(method.upper(), path) for path, methods in routes.items() for method in methods if method != "get"]


def test_every_route_of_a_development_engine_has_its_treatment(served: Served) -> None:
    """No route of the real engine is merely unknown to us: it is inference, cheap, or refused."""
    routes = changing_routes(served)
    unknown = [one for one in routes if Router().route(one[0].encode(), one[1].encode()) == Route(Kind.GATED)]
    assert unknown == [("POST", "/invocations")]
    assert len(routes) > 40, routes


def test_what_is_dangerous_never_reaches_the_engine(served: Served) -> None:
    """The engine has the routes and takes them; the front door says 403 to every spelling, and the engine sees none."""
    routes = [*changing_routes(served), ("GET", "/server_info")]
    dangerous = [one for one in routes if Router().route(one[0].encode(), one[1].encode()).kind is Kind.DANGEROUS]
    assert len(dangerous) > 20, dangerous
    for method, path in dangerous:
        encoded = f"%{ord(path[1]):02x}{path[2:]}"
        for written in (path[1:], path.upper()[1:], encoded, encoded.replace("%", "%25")):
            for spelling in SPELLINGS:
                request = post(spelling.format(written), {}).replace(b"POST", method.encode(), 1)
                told = ask(served.port, request)
                assert (told.status, json.loads(told.body)["error"]["code"]) == (403, "forbidden_path"), request
    assert ask(served.socket, post("/reset_mm_cache", {})).status == 200
    log = served.supervisor.out
    until(lambda: '"POST /reset_mm_cache HTTP/1.1" 200' in log.text, within=10.0, what="the engine's access log")
    logged = re.findall(r'"(\w+) (\S+) HTTP/1.1"', log.text)
    seen = [
        one
        for one in logged
        if Router(root_paths=(ROOT,)).route(one[0].encode(), one[1].encode()).kind is Kind.DANGEROUS
    ]
    assert seen == [("POST", "/reset_mm_cache")]


# -- tunnels, and the end ----------------------------------------------------------------------------------------------


def upgrade(target: str, *fields: str, key: str | None = KEY) -> bytes:
    """Give the opening of a websocket."""
    opening = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    return head("GET", target, *opening, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", *fields, key=key)


@pytest.mark.parametrize("target", ["/v1/realtime", "/v1/realtime?model=tiny", "/v1/models", "/nowhere"])
@pytest.mark.parametrize("key", [KEY, None])
def test_a_refused_upgrade_is_bare_vllms(target: str, key: str | None, served: Served) -> None:
    """A text model has no realtime route: what vLLM says to a websocket passes unchanged, and counts as one request."""
    request = upgrade(target, key=key)
    bare, through = ask(served.socket, request), ask(served.port, request)
    # `Connection` is about the engine's connection: the client's own is kept.
    assert without_ours(through, bare).without("date") == bare.without("date", "connection")
    assert (through.status, through.reason, through.body) == (bare.status, bare.reason, bare.body)
    assert through.status == (403 if key or not target.startswith("/v1") else 401)
    assert through.field("x-ledger-id") is not None


def test_a_tunnel_counts_as_one_request(served: Served, engine: TinyEngine) -> None:
    """A websocket of the engine: any message passes both ways, and from the opening to its end it is one request."""
    before = served.watcher.status()["requests"]
    with subprocess.Popen(
        served.sdk(engine, "websocket_sdk.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout
        assert client.stdin
        assert client.stdout.readline() == "open\n"
        status = served.watcher.status()
        assert (status["admission"]["in_flight"], status["requests"]["open"]) == (1, 1)
        client.stdin.close()
        assert client.stdout.readline() == "left 1000\n"
        assert client.wait(30.0) == 0
    until(lambda: served.watcher.status()["admission"]["in_flight"] == 0, within=10.0, what="no place held")
    now = served.watcher.status()["requests"]
    assert {name: now[name] - before[name] for name in ("accepted", "completed", "failed", "cancelled")} == {
        "accepted": 1,
        "completed": 1,
        "failed": 0,
        "cancelled": 0,
    }


def test_a_stop_closes_a_tunnel_within_the_budget(served: Served, engine: TinyEngine) -> None:
    """The tunnel keeps the drain open until its budget ends, then is closed and told as cut; the ledger balances."""
    supervisor = served.supervisor
    with subprocess.Popen(
        served.sdk(engine, "websocket_sdk.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout
        assert client.stdout.readline() == "open\n"
        asked = time.monotonic()
        supervisor.signal(signal.SIGTERM)
        assert client.stdout.readline() == "closed without a word\n"
        took = time.monotonic() - asked
        assert client.wait(30.0) == 0
    assert took >= BUDGET * 0.9
    assert supervisor.ends(within=40.0) == 80, supervisor.words()
    books = Books(served.account)
    assert books.audit.holds
    assert books.report["cut"]["n"] == 1
    assert not books.events("outcome", outcome="failed")
    (end,) = books.events("outcome", why="drain_deadline")
    (begin,) = books.events("accepted", id=end["id"])
    assert (begin["class"], end["status"], end["outcome"]) == ("other", 101, "cancelled")
    served.account.expect_nothing_left()
