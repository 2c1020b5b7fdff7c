"""Certificates: what is loaded, what is refused, and how they change under way."""

import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from vllm_supervisor.adapters.tls import Certificates
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.plan import TlsFiles


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """Make a certificate for localhost and its authority."""
    return write_certificate(tmp_path)


def write_certificate(directory: Path) -> TlsFiles:
    """Write a fresh certificate, key and authority to `directory`."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(directory / "key.pem"))
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    return TlsFiles(
        str(directory / "cert.pem"), str(directory / "key.pem"), str(directory / "ca.pem"), 0, None, refresh=False
    )


@pytest.mark.parametrize(("number", "mode"), [(0, ssl.CERT_NONE), (1, ssl.CERT_OPTIONAL), (2, ssl.CERT_REQUIRED)])
def test_client_certificates_are_asked_for_as_vllm_does(files: TlsFiles, number: int, mode: ssl.VerifyMode):
    """`--ssl-cert-reqs` has the standard library's numbers."""
    assert Certificates(replace(files, cert_reqs=number)).current().verify_mode is mode


def test_ciphers_are_those_asked_for(files: TlsFiles):
    """`--ssl-ciphers` reaches the context."""
    context = Certificates(replace(files, ciphers="ECDHE-RSA-AES128-GCM-SHA256")).current()
    names = {cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] != "TLSv1.3"}
    assert names == {"ECDHE-RSA-AES128-GCM-SHA256"}


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"certfile": "/nowhere/cert.pem"}, "--ssl-certfile"),
        ({"keyfile": "/nowhere/key.pem"}, "--ssl-certfile"),
        ({"ca_certs": "/nowhere/ca.pem"}, "--ssl-ca-certs"),
        ({"ciphers": "NO-SUCH-CIPHER"}, "--ssl-ciphers"),
    ],
)
def test_a_fault_names_its_option(files: TlsFiles, change: dict[str, str], option: str):
    """What cannot be used is a SetupError of one line with option and value."""
    with pytest.raises(SetupError, match=option) as raised:
        Certificates(replace(files, **change))
    assert next(iter(change.values())) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_reload_takes_new_files_and_keeps_old_ones_when_they_are_broken(files: TlsFiles, tmp_path: Path):
    """A changed file is noticed; a good one is used for the next connection, a broken one changes nothing."""
    certificates = Certificates(files)
    first = certificates.current()
    assert not certificates.stale()
    write_certificate(tmp_path)
    assert certificates.stale()
    certificates.reload()
    second = certificates.current()
    assert second is not first
    assert not certificates.stale()
    Path(files.certfile).write_text("broken")
    with pytest.raises(SetupError):
        certificates.reload()
    assert certificates.current() is second
    assert certificates.stale()
