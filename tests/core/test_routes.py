"""Paths and their treatment: exact where we are generous, in every spelling where we refuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.routes import DANGEROUS, Kind, Route, Router, plainest
from vllm_supervisor.core.words import RequestClass

ROUTER = Router()
PREFIXED = Router(root_paths=("/api/v9",))


@pytest.mark.parametrize(
    ("method", "target", "kind", "request_class"),
    [
        (b"POST", b"/v1/chat/completions", Kind.GATED, RequestClass.CHAT),
        (b"POST", b"/v1/chat/completions?x=1", Kind.GATED, RequestClass.CHAT),
        (b"POST", b"/v1/chat/completions/batch", Kind.GATED, RequestClass.CHAT),
        (b"POST", b"/v1/completions", Kind.GATED, RequestClass.COMPLETIONS),
        (b"GET", b"/v1/completions", Kind.GATED, RequestClass.COMPLETIONS),
        (b"POST", b"/v1/responses", Kind.GATED, RequestClass.RESPONSES),
        (b"GET", b"/v1/responses/resp_1", Kind.CHEAP, RequestClass.OTHER),
        (b"POST", b"/v1/responses/resp_1/cancel", Kind.CHEAP, RequestClass.OTHER),
        (b"POST", b"/v1/responses/a/b/cancel", Kind.GATED, RequestClass.OTHER),
        (b"POST", b"/v1/messages", Kind.GATED, RequestClass.MESSAGES),
        (b"POST", b"/v1/messages/count_tokens", Kind.CHEAP, RequestClass.OTHER),
        (b"POST", b"/tokenize", Kind.CHEAP, RequestClass.OTHER),
        (b"POST", b"/tokenize/", Kind.GATED, RequestClass.OTHER),
        (b"POST", b"/v1/chat/completions/render", Kind.CHEAP, RequestClass.OTHER),
        (b"POST", b"/v1/completions/derender", Kind.CHEAP, RequestClass.OTHER),
        (b"POST", b"/v1/new_idea/render", Kind.GATED, RequestClass.OTHER),
        (b"POST", b"/v1/new_idea", Kind.GATED, RequestClass.OTHER),
        (b"PUT", b"/v1/new_idea", Kind.GATED, RequestClass.OTHER),
        (b"POST", b"/v2/rerank", Kind.GATED, RequestClass.POOLING),
        (b"POST", b"/v1/audio/transcriptions", Kind.GATED, RequestClass.AUDIO),
        (b"POST", b"/inference/v1/generate", Kind.GATED, RequestClass.GENERATE),
        (b"GET", b"/v1/models", Kind.CHEAP, RequestClass.OTHER),
        (b"OPTIONS", b"/v1/chat/completions", Kind.CHEAP, RequestClass.OTHER),
        (b"GET", b"/livez", Kind.LIVE, RequestClass.OTHER),
        (b"HEAD", b"/readyz?verbose", Kind.READY, RequestClass.OTHER),
        (b"GET", b"/health", Kind.READY, RequestClass.OTHER),
        (b"POST", b"/ping", Kind.READY, RequestClass.OTHER),
        (b"POST", b"/health", Kind.GATED, RequestClass.OTHER),
        (b"GET", b"/startupz", Kind.STARTED, RequestClass.OTHER),
        (b"GET", b"/metrics", Kind.METRICS, RequestClass.OTHER),
        (b"POST", b"/sleep", Kind.DANGEROUS, RequestClass.OTHER),
        (b"GET", b"/server_info", Kind.DANGEROUS, RequestClass.OTHER),
        (b"POST", b"/v1/load_lora_adapter", Kind.DANGEROUS, RequestClass.OTHER),
        (b"POST", b"/inference/v1/abort_requests", Kind.DANGEROUS, RequestClass.OTHER),
        (b"DELETE", b"/adapters/mine", Kind.DANGEROUS, RequestClass.OTHER),
        (b"DELETE", b"/ADAPTERS//x/../mine/", Kind.DANGEROUS, RequestClass.OTHER),
        (b"GET", b"/adaptersx", Kind.CHEAP, RequestClass.OTHER),
        (b"GET", b"/is_sleeping", Kind.CHEAP, RequestClass.OTHER),
    ],
)
def test_route(method: bytes, target: bytes, kind: Kind, request_class: RequestClass):
    """Each kind of path gets its treatment and its class."""
    assert ROUTER.route(method, target) == Route(kind, request_class)


def test_every_upgrade_passes_the_gate():
    """A websocket is gated wherever it points, under its class where it is known."""
    assert ROUTER.route(b"GET", b"/v1/realtime", upgrade=True) == Route(Kind.GATED, RequestClass.REALTIME)
    assert ROUTER.route(b"GET", b"/v1/models", upgrade=True) == Route(Kind.GATED, RequestClass.OTHER)


@pytest.mark.parametrize(
    "spelling",
    [
        "/{}",
        "//{}",
        "/./{}",
        "/x/../{}",
        "/{}/",
        "/{}?level=1",
        "/{}/.",
        "/%2e/{}",
        "/x/%2e%2e/{}",
        "/x%2f..%2f{}",
        "/{};a=b",
        "/;/{}",
        "\\{}",
        "/x\\..\\{}",
    ],
)
@pytest.mark.parametrize("path", sorted(DANGEROUS))
def test_dangerous_in_every_spelling(spelling: str, path: str):
    """Detours, parameters and slashes do not hide a dangerous path; nor do case and encoding of any letter."""
    name = path[1:]
    encoded = "".join(f"%{ord(letter):02X}" for letter in name)
    twice = encoded.replace("%", "%25")
    for written in (name, name.upper(), name.replace("/", "//"), encoded, twice):
        target = spelling.format(written).encode()
        assert ROUTER.route(b"POST", target).kind is Kind.DANGEROUS, target
        assert PREFIXED.route(b"POST", b"/api/v9" + target).kind is Kind.DANGEROUS, target
        assert PREFIXED.route(b"POST", b"/API//v9" + target).kind is Kind.DANGEROUS, target


def test_allowed_paths_pass_the_gate():
    """A listed dangerous path is gated like any other POST, however it was written in the list; others stay refused."""
    router = Router(allow_paths=("/Sleep/",))
    assert router.route(b"POST", b"/sleep").kind is Kind.GATED
    assert router.route(b"POST", b"/wake_up").kind is Kind.DANGEROUS
    router = Router(allow_paths=("/adapters",))
    assert router.route(b"DELETE", b"/adapters/mine") == Route(Kind.GATED, admin=True)


def test_root_path_is_taken_off_once():
    """Paths are known with and without the root path, as Starlette knows them."""
    for target in (b"/health", b"/api/v9/health"):
        assert PREFIXED.route(b"GET", target).kind is Kind.READY
    assert PREFIXED.route(b"POST", b"/api/v9/v1/completions").request_class is RequestClass.COMPLETIONS
    assert PREFIXED.route(b"GET", b"/api/v9/api/v9/health").kind is Kind.CHEAP
    assert PREFIXED.route(b"GET", b"/api/v9x/health").kind is Kind.CHEAP


def test_health_can_mean_alive():
    """`health_means_alive` moves /health and /ping to liveness and leaves /readyz."""
    router = Router(health_means_alive=True)
    assert [router.route(b"GET", path).kind for path in (b"/health", b"/ping", b"/readyz")] == [
        Kind.LIVE,
        Kind.LIVE,
        Kind.READY,
    ]


@given(st.text(alphabet="/%.2eEfF5\\;aA", max_size=40))
def test_plainest_is_stable(path: str):
    """The plainest spelling has no detours left and does not grow."""
    plain = plainest(path)
    assert plain.startswith("/")
    assert "//" not in plain
    assert ".." not in plain.split("/")  # no folder of ours can be written with these letters
    assert plain == plain.lower()


@pytest.mark.parametrize(
    "path",
    [
        *("..", "%2e%2e", ".%2e", "%2E.", "..;x", "..%3bx", "..%2f", "../", "..\\", "%252e%252e", ".", "..."),
        *("x/..", "x/../..", "../..", "../../adapters/..", "../v1/models", "..%00", "..%20", "..?x", "./..", "//.."),
    ],
)
@pytest.mark.parametrize("before", ["/adapters/", "//ADAPTERS/", "/x/../adapters/", "/%61dapters/", "/adapters%2f"])
def test_nothing_leads_out_of_a_dangerous_folder(before: str, path: str):
    """Starlette takes `..` for the name of an adapter, so it is one here, with and without the root path."""
    target = (before + path).encode()
    assert ROUTER.route(b"DELETE", target).kind is Kind.DANGEROUS
    assert PREFIXED.route(b"DELETE", b"/api/v9" + target).kind is Kind.DANGEROUS


@pytest.mark.parametrize(
    ("roots", "prefix", "kind"),
    [
        (("/a", "/b"), "/a", Kind.DANGEROUS),
        (("/a", "/b"), "/b", Kind.DANGEROUS),
        (("/a", "/b"), "/b/a", Kind.DANGEROUS),
        (("/a", "/b"), "/a/a/b/a", Kind.DANGEROUS),
        (("/a", "/a/v1"), "/a", Kind.DANGEROUS),
        (("/a/b/",), "/a/b", Kind.DANGEROUS),
        (("/A/b",), "/a/%42", Kind.DANGEROUS),
        (("a",), "/a", Kind.DANGEROUS),
        (("/a/b",), "/a", Kind.GATED),
        (("/a",), "/ab", Kind.GATED),
        (("", "/"), "/a", Kind.GATED),
    ],
)
@pytest.mark.parametrize("path", ["/sleep", "/v1/load_lora_adapter", "/adapters/.."])
def test_dangerous_behind_every_root_path(roots: tuple[str, ...], prefix: str, kind: Kind, path: str):
    """Whichever prefix the engine goes by, and in whatever order they stand, what is behind it is looked at."""
    router = Router(root_paths=roots)
    assert router.route(b"POST", (prefix + path).encode()).kind is kind
    assert router.route(b"POST", path.encode()).kind is Kind.DANGEROUS


def test_health_and_class_behind_every_root_path():
    """The longest root path is taken off."""
    router = Router(root_paths=("/a", "/a/b"))
    for root in (b"", b"/a", b"/a/b"):
        assert router.route(b"GET", root + b"/readyz").kind is Kind.READY
        assert router.route(b"POST", root + b"/v1/completions").request_class is RequestClass.COMPLETIONS


def test_long_paths_cost_little():
    """A path of many segments or root paths is decided in work that grows with its length alone."""
    router = Router(root_paths=("/a", "/a/a", "/b"))
    for path in (b"/a" * 30_000, b"/.." * 20_000, b"/adapters" + b"/.." * 20_000, b"/a/.." * 12_000, b"/a/b" * 15_000):
        assert router.route(b"POST", path + b"/x").kind in {Kind.GATED, Kind.DANGEROUS}


def test_deeply_encoded_path_costs_little():
    """A path encoded thousands of times over is decided in bounded work."""
    assert ROUTER.route(b"POST", b"/%" + b"25" * 30000 + b"73leep").kind is Kind.GATED
