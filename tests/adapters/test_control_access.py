"""The group that may use the control socket."""

import grp
import os
import re
import socket
import stat
from pathlib import Path

import pytest

from vllm_supervisor.adapters import control_access
from vllm_supervisor.core.errors import SetupError


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a private socket in a private directory."""
    place = tmp_path_factory.mktemp("g") / "control.sock"
    place.parent.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(place))
    place.chmod(0o600)
    return place


def another_group() -> grp.struct_group:
    """Give a group this user may hand things to that is not its first one, where there is one."""
    numbers = range(1, 1000) if os.geteuid() == 0 else os.getgroups()
    known = {group.gr_gid: group for group in grp.getgrall()}
    return next((known[n] for n in numbers if n in known and n != os.getegid()), known[os.getegid()])


def test_a_group_may_enter_and_speak_and_nothing_else(path: Path) -> None:
    """Its members get the socket and the way to it; they cannot list the directory, and others get nothing."""
    group = another_group()
    control_access.open_to_group(path, group.gr_name)
    for one, mode in ((path.parent, 0o710), (path, 0o660)):
        found = one.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid, found.st_uid) == (mode, group.gr_gid, os.geteuid())


def test_an_unknown_group_is_told(path: Path) -> None:
    """With the key and the mend, and nothing is opened."""
    with pytest.raises(SetupError, match=re.escape("control.group = 'no such': this machine has no such group")):
        control_access.open_to_group(path, "no such")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_group_we_may_not_give_to_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's refusal is one line, and the socket stays private."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refused)
    with pytest.raises(SetupError, match="cannot be given to it: Operation not permitted; only a member may, or root"):
        control_access.open_to_group(path, another_group().gr_name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
