"""What an attacker sends, against uvicorn with each of its parsers behind our front door: nothing is smuggled.

Smuggled is a request that the engine's app saw and the front door did not admit; an admin route is never reached.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from fakes.door import PATIENCE, Client, Door, in_trio, open_door
from fakes.ports import free_port
from fakes.smuggling import ATTACKS, KEYS, SECOND, SLEEP, WEBSOCKET, Attack, head, sized
from fakes.supervisor_process import Account, until
from fakes.supervisor_process import Client as SupervisorClient
from fakes.uvicorn_engine import ADMIN, ROOT, SERVERS, build, is_admin
from fakes.wire import ask
from vllm_supervisor.core.front_door_settings import FrontDoorSettings
from vllm_supervisor.core.http_semantics import well_formed
from vllm_supervisor.core.routes import DANGEROUS, Kind, Router

SETTINGS = FrontDoorSettings(root_paths=(ROOT,))
_ROUTER = Router(root_paths=(ROOT,))
_VISIBLE = frozenset(map(chr, range(0x21, 0x7F))) - {"#"}
PIECES = 17  # of one attack, where it does not come at once


class Uvicorn:
    """One of the servers, asked past the front door for what its app has served."""

    def __init__(self, path: Path) -> None:
        """Ask on the socket at `path`."""
        self.path = str(path)
        self._http = httpx.Client(transport=httpx.HTTPTransport(uds=self.path), base_url="http://engine", timeout=20)

    def taken(self) -> list[dict[str, Any]]:
        """Give what was served since the last call. What was sent before is read before the second question."""
        return [entry for _ in range(2) for entry in self._http.get("/_taken").json()]

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the directory with the servers' sockets; all of them run in one process."""
    directory = tmp_path_factory.mktemp("u")
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(root / part) for part in ("tests", "supervisor"))}
    process = subprocess.Popen([sys.executable, "-m", "fakes.uvicorn_engine", str(directory)], env=env)

    def listens() -> bool:
        assert process.poll() is None, "the servers have ended"
        for name in SERVERS:
            with socket.socket(socket.AF_UNIX) as sock:
                if sock.connect_ex(str(directory / name)):
                    return False
        return True

    try:
        until(listens, within=60, what="every server listens")
        yield directory
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module", params=SERVERS.keys())
def engine(request: pytest.FixtureRequest, sockets: Path) -> Iterator[Uvicorn]:
    """Give each of the servers."""
    server = Uvicorn(sockets / request.param)
    server.taken()
    yield server
    server.close()


async def send(client: Client, raw: bytes, pieces: int) -> None:
    """Send `raw` in `pieces`; the front door may have turned its back meanwhile."""
    size = -(-len(raw) // pieces)
    try:
        for start in range(0, len(raw), size):
            await client.send(raw[start : start + size])
            await trio.lowlevel.checkpoint()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


async def answers(client: Client, expected: tuple[str, ...]) -> list[bytes]:
    """Receive the answers that are expected and give their bodies."""
    bodies = []
    for statuses in expected:
        status = b"100"
        while status == b"100":
            lines = (await client.until(b"\r\n\r\n")).split(b"\r\n")
            status = lines[0].split(b" ")[1]
        assert status.decode() in statuses.rstrip("-").split(), lines
        size = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        bodies.append(b"" if statuses.endswith("-") else await client.exactly(size))
    return bodies


async def expect_end(client: Client) -> None:
    """Fail if anything but the end follows."""
    try:
        rest = await client.to_end()
    except trio.BrokenResourceError:
        rest = client.unread
    assert rest == b""


async def expect_in_step(door: Door, client: Client, path: bytes) -> None:
    """Fail unless the next request on this connection is given the answer to it."""
    await client.get(path)
    (body,) = await answers(client, ("200",))
    assert b'"path":"%b"' % path in body


async def served(engine: Uvicorn, door: Door) -> list[dict[str, Any]]:
    """Give what the app has served, and fail for whatever it should not have: admin routes, requests without our id."""
    fresh = await door.client()
    await expect_in_step(door, fresh, b"/sync")  # on the connection that was used last, if it is kept
    await fresh.close()
    entries = await trio.to_thread.run_sync(engine.taken)
    assert [entry for entry in entries if entry["kind"] == ADMIN] == []
    ids = [value for entry in entries for name, value in entry["fields"] if name == "x-request-id"]
    assert len(ids) == len(entries)
    assert {one for one in ids if one != "led-mine"} <= door.admitted
    assert entries.pop()["path"] == "/sync"
    return entries


async def carry_out(engine: Uvicorn, door: Door, attack: Attack, pieces: int) -> None:
    """Send one attack and fail unless everything is as the table says."""
    client = await door.client()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, client, attack.raw, pieces)
        await answers(client, attack.answers)
        if attack.open:
            await expect_in_step(door, client, b"/after")
        else:
            await expect_end(client)
        await client.close()
    entries = await served(engine, door)
    if attack.late and pieces > 1 and entries:
        assert [entry["whole"] for entry in entries] == [False]
        return
    if attack.open:
        assert entries.pop()["path"] == "/after"
    taken = [(entry["method"], entry["path"], entry["body"].encode("latin-1")) for entry in entries]
    assert taken == list(attack.taken)
    if attack.fields:
        seen = dict(entries[0]["fields"])
        assert seen | attack.fields == seen


@pytest.mark.parametrize("pieces", [1, PIECES], ids=["whole", "pieces"])
@pytest.mark.parametrize("engine", ["httptools", "h11"], indirect=True)
def test_attacks(engine: Uvicorn, pieces: int):
    """Of every attack: the answers are those of the table, the engine serves what it says, and all stay in step."""
    wrong: dict[str, object] = {}

    async def all_of_them() -> None:
        async with open_door(engine_at=engine.path, settings=SETTINGS) as door:
            for name, attack in ATTACKS.items():
                try:
                    with trio.fail_after(PATIENCE):
                        await carry_out(engine, door, attack, pieces)
                except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - each is told, with its name, at the end
                    wrong[name] = error
                    engine.taken()

    trio.run(all_of_them)
    assert wrong == {}


@pytest.mark.parametrize("keys", [KEYS, b""], ids=["keys", "no keys"])
@pytest.mark.parametrize("path", [b"/x", b"/ws"])
@in_trio
async def test_what_follows_an_upgrade_is_never_a_request_of_the_engines(engine: Uvicorn, path: bytes, keys: bytes):
    """Behind a refused upgrade we read it and decide; behind an accepted one it goes to the websocket unread."""
    async with open_door(engine_at=engine.path, settings=SETTINGS) as door:
        for behind in (SLEEP, SECOND, b"\r\n" * 100 + SLEEP, b"\x81\x05hello", b"\x81\x85\0\0\0\0hello"):
            client = await door.client()
            await client.send(head(b"GET " + path, (WEBSOCKET + keys)[:-2]) + behind)
            status = (await client.until(b"\r\n")).split(b" ")[1]
            if "plain" in engine.path:
                assert status == b"200"
            else:
                assert (status == b"101") == (path == b"/ws" and keys == KEYS)
                assert status in {b"101", b"400", b"403", b"404", b"426"}
            client.half_close()
            await expect_end_of_any(client)
            await door.idle()
            seen = [entry["path"] for entry in await served(engine, door)]
            assert seen in ([], [path.decode()], ["/second"], [path.decode(), "/second"])
            assert status != b"101" or "/second" not in seen


async def expect_end_of_any(client: Client) -> None:
    """Receive whatever comes until the end."""
    with contextlib.suppress(trio.BrokenResourceError):
        await client.to_end()


_STARLETTE = build().router
_SEGMENTS = st.sampled_from(
    [
        *sorted({part for path in DANGEROUS for part in path.split("/") if part}),
        *(
            "api",
            "API",
            "x",
            "",
            ".",
            "..",
            "...",
            " ",
            "\n",
            "\t",
            ";",
            ";a",
            "?",
            "#",
            "%",
            "%2e",
            "%2F",
            "\\",
            "\0",
            "\xe4",
        ),
    ]
)


@given(
    st.sampled_from([*sorted(DANGEROUS), "/adapters/x", "/adapters"]),
    st.lists(st.tuples(st.sampled_from(["/", "//", "\\", ";", "%", "%25"]), _SEGMENTS), max_size=3),
    st.lists(st.tuples(st.sampled_from(["/", "//", "\\", ";", "", "%"]), _SEGMENTS), max_size=3),
    st.randoms(use_true_random=False),
)
def test_every_spelling_that_starlette_takes_for_an_admin_path_is_refused(
    path: str, before: list[tuple[str, str]], behind: list[tuple[str, str]], rng: Random
):
    """Whatever Starlette's own router would give to an admin route is refused, with and without the root path."""
    written = "".join(map("".join, before)) + path + "".join(map("".join, behind))
    encoded = "".join(_spelt(letter, rng) for letter in written)
    target = encoded if encoded.startswith("/") else "/" + encoded
    raw = target.partition("?")[0]
    if is_admin(_STARLETTE, "POST", unquote(raw)) and well_formed(head(b"POST " + target.encode())):
        assert _ROUTER.route(b"POST", target.encode()).kind is Kind.DANGEROUS


def _spelt(letter: str, rng: Random) -> str:
    if letter not in _VISIBLE or rng.random() < 0.2:
        return "".join(f"%{byte:02x}" if rng.random() < 0.5 else f"%{byte:02X}" for byte in letter.encode())
    return letter


def test_starlette_would_take_many_spellings():
    """The check before this one is no empty one: these are all given to an admin route."""
    for raw in (
        "/sleep",
        "/api/sleep",
        "/%73leep",
        "/sleep%0a",
        "/%61pi%2fsleep",
        "/adapters/..",
        "/api/adapters/%2e%2e",
    ):
        assert is_admin(_STARLETTE, "POST", unquote(raw)), raw
        assert _ROUTER.route(b"POST", raw.encode()).kind is Kind.DANGEROUS
    assert not is_admin(_STARLETTE, "POST", "/x/sleep")


@pytest.mark.parametrize("told", ["command", "key"])
def test_run_refuses_admin_paths_behind_the_prefix_of_its_engine(account: Account, told: str) -> None:
    """`run` takes a `--root-path` over from the command, or from `engine.root_path` where the command hides it."""
    port = free_port()
    sets = ("--set", f"listen.port={port}", "--set", "engine.ready_probe=false")
    engine = [sys.executable, "-m", "vllm_supervisor.mock", "serve", "tiny", "--uds", "{uds}"]
    if told == "command":
        supervisor = account.start(*sets, "run", "--", *engine, "--root-path", ROOT)
    else:
        hidden = ("/bin/sh", "-c", 'exec "$@" "$PREFIX" /api', "sh", *engine)
        also = ("--set", "engine.env.PREFIX=--root-path", "--set", f"engine.root_path={ROOT}")
        supervisor = account.start(*sets, *also, "run", "--", *hidden)
    with SupervisorClient(port) as client:
        supervisor.until(client.is_ready, within=20.0, what="ready")
        assert client.get(f"{ROOT}/v1/models").status_code == 200
        assert client.get(f"{ROOT}/readyz").status_code == 200
        for path in ("/sleep", f"{ROOT}/sleep", f"{ROOT}//sleep", "/%61pi/adapters/..", f"{ROOT}{ROOT}/collective_rpc"):
            answer = ask(port, sized(b"POST " + path.encode(), b"{}"))
            assert (answer.status, b"forbidden_path" in answer.body) == (403, True)
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=20.0) == 0
