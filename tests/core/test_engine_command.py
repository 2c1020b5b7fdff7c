"""The engine's command line and environment."""

import pytest

from vllm_supervisor.core.address import TcpAddress, UnixAddress
from vllm_supervisor.core.engine_command import EngineKind, Transport, root_paths_in, run_command, serve_command
from vllm_supervisor.core.engine_env import build
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.vllm_args import read

SOCKET = UnixAddress("/run/e.sock")
PORT = TcpAddress("127.0.0.1", 4711)


def serve(line: str, transport: Transport, kind: EngineKind = EngineKind.VLLM) -> list[str]:
    """Return the command line `serve LINE` becomes."""
    words = line.split()
    program = ("/opt/vllm",) if kind is EngineKind.VLLM else ("/py", "-m", "mock")
    command = serve_command(kind, program, words, read(words, {}), transport)
    return command.argv(SOCKET if transport is Transport.UDS else PORT)


@pytest.mark.parametrize(
    ("line", "transport", "expected"),
    [
        ("m", Transport.UDS, "m --port 0 --uds /run/e.sock"),
        ("m", Transport.TCP, "m --host 127.0.0.1 --port 4711"),
        ("m --uds /u --port 9", Transport.UDS, "m --uds /run/e.sock --port 0"),
        ("m --uds /u --port 9", Transport.TCP, "m --uds= --port 4711 --host 127.0.0.1"),
        ("m --port=9 --host=h -x y", Transport.TCP, "m --port 4711 --host 127.0.0.1 -x y"),
        ("m --por 9 --ho h", Transport.TCP, "m --port 4711 --host 127.0.0.1"),
        ("m --port 9 --port=8", Transport.UDS, "m --port 0 --port 0 --uds /run/e.sock"),
        ("--api-key k --port 9 m", Transport.UDS, "--api-key k --port 0 m --uds /run/e.sock"),
        ("m -O3 --a.b 1 --port 9 --c.d=2", Transport.UDS, "m -O3 --a.b 1 --port 0 --c.d=2 --uds /run/e.sock"),
        ("m --port 9 -- --port 8", Transport.UDS, "m --port 0 --uds /run/e.sock -- --port 8"),
        ("m --new_option --port 9", Transport.UDS, "m --new_option --port 0 --uds /run/e.sock"),
        ("m --ssl_certf=c", Transport.UDS, "m --ssl-certfile= --port 0 --uds /run/e.sock"),
        (
            "m --ssl-keyfile k --ssl-certfile c --ssl-ca-certs a --enable-ssl-refresh",
            Transport.TCP,
            "m --ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --enable-ssl-refresh --host 127.0.0.1 --port 4711",
        ),
        ("m -x -- y", Transport.UDS, "m -x --port 0 --uds /run/e.sock -- y"),
        ("", Transport.UDS, "--port 0 --uds /run/e.sock"),
    ],
)
def test_serve_gives_the_engine_a_private_address(line: str, transport: Transport, expected: str) -> None:
    """A private address and no TLS, in place where the user gave his, else at the end; all other words stay."""
    assert serve(line, transport) == ["/opt/vllm", "serve", *expected.split()]


def test_what_stands_in_vllms_file_is_overridden_on_the_command_line() -> None:
    """A value of the YAML file loses against an appended one, which is the only case of a duplicate."""
    words = ["m", "--config", "v.yaml"]
    options = read(words, {}, {"port": 9, "uds": "/u", "ssl-certfile": "c"})
    command = serve_command(EngineKind.VLLM, ("/v",), words, options, Transport.TCP)
    assert command.argv(PORT)[2:] == [*words, "--ssl-certfile=", "--uds=", "--host", "127.0.0.1", "--port", "4711"]


def test_the_stand_in_gets_the_same_words() -> None:
    """The stand-in is started with the same arguments as vLLM."""
    assert serve("m --port 9", Transport.UDS, EngineKind.MOCK)[:4] == ["/py", "-m", "mock", "serve"]
    assert serve("m --port 9", Transport.UDS, EngineKind.MOCK)[4:] == serve("m --port 9", Transport.UDS)[2:]


@pytest.mark.parametrize(
    ("arguments", "address", "expected"),
    [
        (["--uds={uds}"], SOCKET, ["--uds=/run/e.sock"]),
        (["-u", "{uds}", "x{uds}y{uds}"], SOCKET, ["-u", "/run/e.sock", "x/run/e.socky/run/e.sock"]),
        (["--bind={host}:{port}"], PORT, ["--bind=127.0.0.1:4711"]),
        (["-p", "{port}"], PORT, ["-p", "4711"]),
        (["{port}", '{"a": {"port": 1}}', "{PORT}", "{{port}}", "${port}", "{}", "{ port }"], PORT,
         ["4711", '{"a": {"port": 1}}', "{PORT}", "{4711}", "$4711", "{}", "{ port }"]),
        (["{uds}", "{host}:{port}"], SOCKET, ["/run/e.sock", "127.0.0.1:0"]),
    ],
)  # fmt: skip
def test_run_replaces_exactly_the_tokens(
    arguments: list[str], address: UnixAddress | TcpAddress, expected: list[str]
) -> None:
    """The three tokens are replaced wherever they stand, and no other brace is touched."""
    command = run_command("/bin/engine", arguments)
    assert command.argv(address) == ["/bin/engine", *expected]
    assert command.transport is (Transport.UDS if isinstance(address, UnixAddress) else Transport.TCP)


@pytest.mark.parametrize("arguments", [[], ["--port", "8000"], ["{host}"], ["{socket}"], ["{Port}"]])
def test_run_must_say_where_the_engine_listens(arguments: list[str]) -> None:
    """Without {uds} or {port} the engine's address cannot be known: a usage error."""
    with pytest.raises(UsageError, match="where the engine shall listen"):
        run_command("/bin/engine", arguments)


def environment(
    environ: dict[str, str], extra: dict[str, str] | None = None, path_first: str = "", *, unix_socket: bool = False
) -> dict[str, str]:
    """Build an environment with fixed marks."""
    return build(
        environ,
        extra or {},
        run="r1",
        incarnation=2,
        unix_socket=unix_socket,
        rpc_directory="/run/rpc",
        path_first=path_first,
    )


ADDED = {
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
    "PYTHONUNBUFFERED": "1",
    "SPT_NOENV": "1",
    "VLLM_RPC_BASE_PATH": "/run/rpc",
    "VSUP_RUN": "r1",
    "VSUP_INCARNATION": "2",
}


def test_what_speaks_to_us_is_taken_out() -> None:
    """The service manager's, socket activation's and our own variables do not reach the engine; others do."""
    ours = {
        "NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "LISTEN_FDS": "1", "LISTEN_PID": "3",
        "LISTEN_FDNAMES": "x", "VLLM_SUPERVISOR_DRAIN__BUDGET": "1s", "PROMETHEUS_MULTIPROC_DIR": "/old",
    }  # fmt: skip
    assert environment({**ours, "HOME": "/h", "VLLM_API_KEY": "k"}) == {"HOME": "/h", "VLLM_API_KEY": "k", **ADDED}


def test_the_users_keep_alive_stays() -> None:
    """A keep-alive time that the user has set is not overridden."""
    assert environment({"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "5"})["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "5"


@pytest.mark.parametrize(
    ("told", "unix_socket", "trusted"),
    [
        (None, True, "*"),
        ("10.0.0.0/8", True, "*"),
        ("", True, "*"),
        (None, False, None),  # uvicorn's default is 127.0.0.1, which is us
        ("*", False, "*"),
        ("127.0.0.1", False, "127.0.0.1"),
        ("10.0.0.0/8", False, "10.0.0.0/8,127.0.0.1"),
    ],
)
@pytest.mark.parametrize("by", ["environ", "extra"])
def test_the_engine_believes_the_front_door(by: str, told: str | None, unix_socket: bool, trusted: str | None) -> None:
    """On a private Unix socket everything is believed, on loopback what the user trusts and we."""
    given = {} if told is None else {"FORWARDED_ALLOW_IPS": told}
    environ, extra = (given, {}) if by == "environ" else ({"FORWARDED_ALLOW_IPS": "9.9.9.9"} if given else {}, given)
    assert environment(environ, extra, unix_socket=unix_socket).get("FORWARDED_ALLOW_IPS") == trusted


def test_engine_env_wins_but_for_the_markers() -> None:
    """engine.env overrides everything, except the markers by which our processes are found."""
    made = environment(
        {"A": "ours"}, {"A": "theirs", "SPT_NOENV": "", "VSUP_RUN": "forged", "PROMETHEUS_MULTIPROC_DIR": "/d"}
    )
    assert (made["A"], made["SPT_NOENV"], made["VSUP_RUN"], made["PROMETHEUS_MULTIPROC_DIR"]) == (
        "theirs",
        "",
        "r1",
        "/d",
    )


@pytest.mark.parametrize(
    ("environ", "extra", "path"),
    [
        ({"PATH": "/usr/bin"}, {}, "/v/bin:/usr/bin"),
        ({}, {}, "/v/bin:/usr/local/bin:/usr/bin:/bin"),
        ({"PATH": ""}, {}, "/v/bin"),
        ({"PATH": "/usr/bin"}, {"PATH": "/only"}, "/v/bin:/only"),
    ],
)
def test_the_executables_directory_comes_first(environ: dict[str, str], extra: dict[str, str], path: str) -> None:
    """The directory of the engine's executable is the first on its PATH, whatever the rest is."""
    assert environment(environ, extra, "/v/bin")["PATH"] == path


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("vllm", "--root-path", "/api"), ("/api",)),
        (("vllm", "--root-path=/api"), ("/api",)),
        (("vllm", "--root_path", "/api"), ("/api",)),
        (("vllm", "--root_path=/api"), ("/api",)),
        (("vllm", "--root-pa", "/api"), ("/api",)),
        (("vllm", "--ro=/api"), ("/api",)),
        (("--root-path", "/a", "--root-path=/b"), ("/a", "/b")),
        (("--", "vllm", "--root-path", "/api", "--", "x"), ("/api",)),
        (("-c", "exec vllm serve m --root-path /api --uds {uds}"), ("/api",)),
        (("-c", "vllm --root-path='/api' m"), ("/api",)),
        (("--root-path", "--root-path", "/api"), ("--root-path", "/api")),
        (("--root-path",), ()),
        (("--root-path=", "x"), ()),
        (("--r", "/api", "--rope-theta", "5", "--root-path-x", "/y", "root-path", "/z", "-ro", "/q"), ()),
    ],
)
def test_root_paths_of_any_command(words: tuple[str, ...], found: tuple[str, ...]):
    """Every one counts, in whichever spelling vLLM and uvicorn take, also in a command for a shell."""
    assert root_paths_in(words) == found
