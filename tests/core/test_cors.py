"""What pages of other origins may read of our own answers, and preflights in the engine's stead."""

import pytest

from vllm_supervisor.core.cors import Cors, field
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.vllm_args import read

PAGE = b"https://chat.example.org"
ALL = Cors(("*",))
ONE = Cors((PAGE.decode(),))
OWN = Cors(("*",), credentials=True)
NARROW = Cors((PAGE.decode(),), methods=("POST",), headers=("X-Key",), credentials=True)


def lines(**fields: bytes) -> bytes:
    """Build header lines."""
    return b"".join(b"%b: %b\r\n" % (name.replace("_", "-").encode(), value) for name, value in fields.items())


def as_dict(text: bytes) -> dict[str, str]:
    """Read header lines, each of a name of its own."""
    pairs = [line.split(": ", 1) for line in text.decode().split("\r\n")[:-1]]
    assert len(pairs) == len({name for name, _ in pairs})
    return dict(pairs)


@pytest.mark.parametrize(
    ("cors", "origin", "origin_allowed", "credentials"),
    [
        (ALL, PAGE, "*", False),
        (ONE, PAGE, PAGE.decode(), False),
        (ONE, b"https://evil.example.org", None, False),
        (ONE, b"https://chat.example.org.evil.org", None, False),
        (ONE, b"null", None, False),
        (OWN, PAGE, PAGE.decode(), True),
        (NARROW, PAGE, PAGE.decode(), True),
        (NARROW, b"https://evil.example.org", None, False),
    ],
)
def test_who_may_read(cors: Cors, origin: bytes, origin_allowed: str | None, credentials: bool) -> None:
    """The allowed origin is named, by "*" only where no credentials are allowed; caches keep origins apart."""
    found = as_dict(cors.fields(lines(Host=b"a", ORIGIN=origin)))
    assert found.get("Access-Control-Allow-Origin") == origin_allowed
    assert ("Access-Control-Allow-Credentials" in found) == credentials
    assert found["Vary"] == "Origin"


def test_requests_of_no_page_get_no_fields() -> None:
    """Without an Origin there is no browser to tell anything."""
    assert ALL.fields(lines(Host=b"a", X_Origin=PAGE)) == b""


@pytest.mark.parametrize(
    ("cors", "method", "asked", "status", "allowed"),
    [
        (ALL, b"POST", b"content-type, x-any", 200, "content-type, x-any"),
        (ALL, b"POST", None, 200, None),
        (ALL, b"TRACE", None, 400, None),
        (NARROW, b"POST", b"Content-Type,x-key", 200, "Accept, Accept-Language, Content-Language, Content-Type, X-Key"),
        (NARROW, b"DELETE", None, 400, "Accept, Accept-Language, Content-Language, Content-Type, X-Key"),
        (NARROW, b"POST", b"x-other", 400, "Accept, Accept-Language, Content-Language, Content-Type, X-Key"),
    ],
)
def test_preflights(cors: Cors, method: bytes, asked: bytes | None, status: int, allowed: str | None) -> None:
    """A preflight is answered by vLLM's options: the method, the fields that may be sent, how long to remember it."""
    fields = {"Origin": PAGE, "Access_Control_Request_Method": method}
    if asked is not None:
        fields["Access_Control_Request_Headers"] = asked
    answer = cors.preflight(b"OPTIONS", lines(**fields))
    assert answer is not None
    assert answer[0] == status
    found = as_dict(answer[2])
    assert found.get("Access-Control-Allow-Headers") == allowed
    assert found["Access-Control-Max-Age"] == "600"


def test_a_stranger_gets_no_preflight() -> None:
    """A page that is not allowed is refused, and its origin is not repeated."""
    answer = ONE.preflight(b"OPTIONS", lines(Origin=b"https://evil.org", Access_Control_Request_Method=b"POST"))
    assert answer is not None
    assert (answer[0], answer[1]) == (400, b"Disallowed CORS origin")
    assert b"evil" not in answer[2]


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        (b"POST", {"Origin": PAGE, "Access_Control_Request_Method": b"POST"}),
        (b"OPTIONS", {"Origin": PAGE}),
        (b"OPTIONS", {"Access_Control_Request_Method": b"POST"}),
    ],
)
def test_what_is_no_preflight(method: bytes, fields: dict[str, bytes]) -> None:
    """Only an OPTIONS with an origin and a method is one."""
    assert ALL.preflight(method, lines(**fields)) is None


def test_the_first_field_counts() -> None:
    """A name is found whatever its case, also in a raw head."""
    raw = b"POST / HTTP/1.1\r\nHost: a:1\r\noRiGin:  b \r\nOrigin: c\r\n\r\n"
    assert field(raw, b"origin") == b"b"
    assert field(raw, b"absent") is None


@pytest.mark.parametrize(
    ("words", "cors"),
    [
        ([], None),
        (["--allowed-origins", "[]"], None),
        (["--allow-credentials"], None),
        (["--allowed-origins", '["*"]'], ALL),
        (['--allowed_origins=["*"]'], ALL),
        (
            [
                "--allowed-origins", f'["{PAGE.decode()}"]', "--allowed-methods", '["POST"]',
                "--allowed-headers", '["X-Key"]', "--allow-credentials",
            ],
            NARROW,
        ),
    ],
)  # fmt: skip
def test_vllms_options(words: list[str], cors: Cors | None) -> None:
    """The policy is what `vllm serve` was told; without origins there is none."""
    assert read(["m", *words], {}).cors == cors


@pytest.mark.parametrize(
    "value", ["*", '"*"', "[1]", "[null]", "{}", "[" * 100_000, '["a\\r\\nX: y"]', "https://a.org", "", "NaN"]
)
def test_no_list_of_origins(value: str) -> None:
    """A value that vLLM could not use either is a usage error that shows how it is written."""
    with pytest.raises(UsageError, match=r"--allowed-origins: expected a JSON list of strings, as in"):
        read(["m", "--allowed-origins", value], {})
