"""Directories as real other users find and make them: who can write where, asked of the kernel, not of a table."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.ports import free_port
from fakes.supervisor_process import Account, Client

pytestmark = pytest.mark.systemd  # it takes root to be somebody else

US, OTHER, GROUP = 61001, 61002, 61003  # nobody's numbers
REFUSED, FITS = False, True

# Prepare a directory as another user; everything is imported while we can still read it.
PREPARE = """
import json, os, sys
from pathlib import Path
from vllm_supervisor.adapters import directories
from vllm_supervisor.core.errors import SetupError
import encodings.ascii, encodings.utf_8
uid, gid, groups, kind, path = json.loads(sys.argv[1])
os.setgroups(groups); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
try:
    getattr(directories, f"prepare_{kind}_directory")(Path(path))
except SetupError as error:
    print(error); sys.exit(78)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a directory of root's that everybody may enter."""
    account = Account()
    account.home.chmod(0o755)
    yield account.home
    account.close()


def prepare(path: Path, *, uid: int, gid: int, groups: list[int], kind: str) -> tuple[int, str]:
    """Prepare `path` as that user; return the status and what was said."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    wanted = json.dumps([uid, gid, groups, kind, str(path)])
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, wanted], env=env, capture_output=True, text=True, timeout=30.0, check=False
    )
    assert done.returncode in (0, 78), done.stderr
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("kind", ["state", "run"])
@pytest.mark.parametrize(
    ("owner", "group", "mode", "uid", "groups", "fits"),
    [
        (US, US, 0o700, US, [], FITS),
        (US, US, 0o755, US, [], FITS),
        (US, US, 0o777, US, [], REFUSED),
        (US, GROUP, 0o775, US, [GROUP], FITS),  # a group without other members
        (US, GROUP, 0o775, US, [], REFUSED),
        (OTHER, OTHER, 0o700, US, [], REFUSED),
        (OTHER, OTHER, 0o777, US, [], REFUSED),
        (0, GROUP, 0o2770, US, [GROUP], FITS),  # Kubernetes' fsGroup
        (0, GROUP, 0o2770, US, [], REFUSED),  # not writable at all
        (0, 0, 0o777, US, [], REFUSED),
        (0, 0, 0o1777, US, [], REFUSED),
        (0, 0, 0o755, US, [], REFUSED),
        (0, 0, 0o700, 0, [], FITS),
        (0, GROUP, 0o770, 0, [], REFUSED),
        (0, GROUP, 0o2770, 0, [GROUP], FITS),
        (US, US, 0o700, 0, [], REFUSED),
        (US, US, 0o777, 0, [], REFUSED),
    ],
)
def test_owners_and_modes(
    owner: int, group: int, mode: int, *, uid: int, groups: list[int], kind: str, place: Path, fits: bool
) -> None:
    """A directory that another user owns or can write is refused with one line; ours, or a volume's, is taken."""
    path = place / "d"
    path.mkdir()
    os.chown(path, owner, group)
    path.chmod(mode)
    status, said = prepare(path, uid=uid, gid=uid, groups=groups, kind=kind)
    assert (status == 0) is fits, said
    assert len(said.splitlines()) == (0 if fits else 1)
    if not fits:
        assert f"set {kind}_dir to" in said


def test_a_sticky_directory_is_shared_safely(place: Path) -> None:
    """Below one like /tmp we make our own; what another user made there before us is refused."""
    place.chmod(0o1777)
    assert prepare(place / "ours" / "n", uid=US, gid=US, groups=[], kind="state") == (0, "")
    assert (place / "ours").stat().st_uid == US
    status, said = prepare(place / "ours" / "n", uid=OTHER, gid=OTHER, groups=[], kind="state")
    assert (status, f"{place}/ours belongs to uid {US}" in said) == (78, True), said
    status, said = prepare(place / "ours" / "n", uid=0, gid=0, groups=[], kind="state")
    assert (status, f"{place}/ours belongs to uid {US}" in said) == (78, True), said


def test_roots_link_is_followed_and_anothers_is_not(place: Path) -> None:
    """The service manager's link to a private directory is followed; a link that another user planted in a sticky place is not."""
    (place / "private" / "x").mkdir(parents=True, mode=0o700)
    (place / "private").chmod(0o755)
    os.chown(place / "private" / "x", US, US)
    (place / "x").symlink_to("private/x")
    assert prepare(place / "x", uid=US, gid=US, groups=[], kind="state") == (0, "")
    (place / "tmp").chmod(0o1777)
    (place / "tmp" / "x").symlink_to(place / "private" / "x")
    os.chown(place / "tmp" / "x", OTHER, OTHER, follow_symlinks=False)
    status, said = prepare(place / "tmp" / "x", uid=US, gid=US, groups=[], kind="state")
    assert (status, "tmp/x belongs to uid" in said) == (78, True), said


def test_an_access_list_makes_a_group_unknown(place: Path) -> None:
    """The group's bits of a directory with an access list are its mask: somebody named there can write."""
    (place / "d").mkdir(mode=0o700)
    # acl(5) as the kernel keeps it: version 2, then (tag, rights, id): owner, user 61002, group, mask, others.
    entries = [(1, 7, -1), (2, 7, OTHER), (4, 0, -1), (16, 7, -1), (32, 0, -1)]
    packed = b"".join(
        tag.to_bytes(2, "little") + rights.to_bytes(2, "little") + (who & 0xFFFFFFFF).to_bytes(4, "little")
        for tag, rights, who in entries
    )
    os.setxattr(place / "d", "system.posix_acl_access", (2).to_bytes(4, "little") + packed)
    status, said = prepare(place / "d", uid=0, gid=0, groups=[], kind="state")
    assert (status, "whom its access list names" in said) == (78, True), said


def test_root_in_a_directory_of_another_user_is_refused() -> None:
    """As root with another user's state directory and a link planted in it: one line, 78, nothing is touched."""
    with Account() as account:
        account.home.chmod(0o755)
        victim, state = account.home / "victim", account.home / "theirs"
        (victim / "1").mkdir(parents=True)
        (victim / "1" / "file").write_text("kept")
        state.mkdir(mode=0o755)
        (state / "incidents").symlink_to(victim)
        (state / "ledger").symlink_to(victim)
        os.chown(state, OTHER, OTHER)
        words = ("--set", f"state_dir={state}", "--engine", "mock", "serve", "tiny", "--port", str(free_port()))
        ended = account.tool(*words)
        assert ended.returncode == 78, ended.stderr
        told = f"state directory {state}: {state} belongs to uid {OTHER}; chown 0 {state}"
        assert ended.stderr == (
            f"vllm-supervisor: {told}, or set state_dir to another directory"
            " (on a volume that only this container reaches: trust_directories = true)\n"
        )
        assert [path.name for path in victim.rglob("*")] == ["1", "file"]


def test_the_group_of_the_control_socket_reaches_nothing_else() -> None:
    """A member may use the control socket and cannot reach the engine's own, whatever its mode."""
    with Account() as account:
        account.home.chmod(0o755)
        (account.home / "run").chmod(0o755)
        port = free_port()
        supervisor = account.start(
            "--set", "control.group=users", "--engine", "mock", "serve", "tiny", "--port", str(port),
            "--mock-start-time", "0s", "--host", "127.0.0.1",
        )  # fmt: skip
        with Client(port) as client:
            supervisor.until(client.is_ready, within=15.0, what="ready")
        home = account.home / "run" / "vllm-supervisor" / str(port)
        [engine] = home.glob("engine-*/sock")
        connect = (
            "import os, socket, sys\n"
            "os.setgroups([100]); os.setresgid(61002, 61002, 61002); os.setresuid(61002, 61002, 61002)\n"
            "for path in sys.argv[1:]:\n"
            "    with socket.socket(socket.AF_UNIX) as one:\n"
            "        print(one.connect_ex(path))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", connect, str(home / "control.sock"), str(engine)],
            capture_output=True, text=True, timeout=30.0, check=True,
        )  # fmt: skip
        assert done.stdout.split() == ["0", "13"]
        with socket.socket(socket.AF_UNIX) as ours:
            ours.connect(str(engine))
