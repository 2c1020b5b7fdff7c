"""What a reload does and says."""

import os
from pathlib import Path
from typing import Any

import pytest
import trustme

from vllm_supervisor.adapters import tls
from vllm_supervisor.core import facts
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.lifecycle import Node, State
from vllm_supervisor.core.plan import TlsFiles
from vllm_supervisor.runtime.reload import NOTHING, Reload


class Certificates:
    """Certificates that can be read again, or not; `reads` counts."""

    def __init__(self, *, bad: bool = False) -> None:
        self.bad = bad
        self.reads = 0

    def reload(self) -> None:
        """Read them."""
        self.reads += 1
        if self.bad:
            raise SetupError("no certificate")


class Quiet:
    """A service manager that listens to nothing."""

    def reloading(self) -> None:
        """A reload begins."""

    def reloaded(self) -> None:
        """It is over."""


GOOD, BAD = "new connections use the certificates read just now", "the certificates in use stay: no certificate"


@pytest.mark.parametrize(
    ("certificates", "node", "said", "told"),
    [
        (None, Node.READY, [NOTHING], []),
        (None, Node.STARTING, [NOTHING], []),
        (None, Node.PARKED, [], [facts.RestartRequested]),
        (Certificates(), Node.READY, [GOOD], []),
        (Certificates(), Node.PARKED, [GOOD], [facts.RestartRequested]),
        (Certificates(bad=True), Node.READY, [BAD], []),
    ],
)
def test_a_reload_says_what_came_of_it(certificates: Any, node: Node, said: list[str], told: list[type]) -> None:
    """Certificates read again or kept, a parked engine tried again (the engine's life says that), or nothing to do."""
    heard: list[str] = []
    facts_told: list[Fact] = []
    reload = Reload(
        certificates,
        refresh=False,
        service=Quiet(),  # type: ignore[arg-type]
        state=lambda: State(node=node),
        tell=facts_told.append,
        say=lambda _event, sentence, _level: heard.append(sentence),
    )
    reload.asked("HUP")
    assert heard == said
    assert [type(fact) for fact in facts_told] == told


def write_pair(directory: Path, *, key: bool = True) -> None:
    """Write a fresh certificate, and its key unless that comes later."""
    pair = trustme.CA().issue_cert("localhost")
    directory.mkdir(exist_ok=True)
    pair.cert_chain_pems[0].write_to_path(str(directory / "tls.crt"))
    if key:
        pair.private_key_pem.write_to_path(str(directory / "tls.key"))


def watched(files: TlsFiles, *, refresh: bool = True) -> tuple[tls.Certificates, Reload, list[str]]:
    """Give certificates, what watches them, and what that says."""
    certificates, heard = tls.Certificates(files), list[str]()
    reload = Reload(
        certificates,
        refresh=refresh,
        service=Quiet(),  # type: ignore[arg-type]
        state=lambda: State(node=Node.READY),
        tell=lambda _fact: None,
        say=lambda _event, sentence, _level: heard.append(sentence),
    )
    return certificates, reload, heard


def pair_in(directory: Path) -> TlsFiles:
    """Name the files of a pair."""
    return TlsFiles(str(directory / "tls.crt"), str(directory / "tls.key"), None, 0, None, refresh=True)


def test_a_renewed_pair_is_taken_and_half_of_one_is_not(tmp_path: Path) -> None:
    """While only the certificate is new the old pair stays and that is told once; with its key it is used."""
    write_pair(tmp_path)
    certificates, reload, heard = watched(pair_in(tmp_path))
    first = certificates.current()
    reload.tick()
    assert heard == []
    write_pair(tmp_path, key=False)
    reload.tick()
    (tmp_path / "tls.crt").write_text("half")  # another fault, the same renewal
    for _ in range(3):
        reload.tick()
    assert certificates.current() is first
    [said] = heard
    assert said.startswith("the certificates in use stay: ")
    write_pair(tmp_path)
    reload.tick()
    reload.tick()
    assert heard[1:] == [GOOD]
    assert certificates.current() is not first


@pytest.mark.parametrize("swap", ["link", "rename"])
def test_a_swap_is_noticed(swap: str, tmp_path: Path) -> None:
    """Kubernetes swaps the link `..data`, certbot and cert-manager rename files into place: both are a change."""
    write_pair(tmp_path / "1")
    write_pair(tmp_path / "2")
    if swap == "link":
        (tmp_path / "..data").symlink_to("1")
        for name in ("tls.crt", "tls.key"):
            (tmp_path / name).symlink_to(f"..data/{name}")
        where = tmp_path
    else:
        where = tmp_path / "1"
    _certificates, reload, heard = watched(pair_in(where))
    if swap == "link":
        (tmp_path / "..new").symlink_to("2")
        (tmp_path / "..new").rename(tmp_path / "..data")
    else:
        for name in ("tls.crt", "tls.key"):
            os.utime(tmp_path / "2" / name, ns=(0, (where / name).stat().st_mtime_ns))
            (tmp_path / "2" / name).rename(where / name)
    reload.tick()
    assert heard == [GOOD]


def test_nothing_is_watched_unasked(tmp_path: Path) -> None:
    """Without `--enable-ssl-refresh` changed files wait for a reload."""
    write_pair(tmp_path)
    _certificates, reload, heard = watched(pair_in(tmp_path), refresh=False)
    write_pair(tmp_path)
    reload.tick()
    assert heard == []
