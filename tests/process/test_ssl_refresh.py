"""Certificates that are renewed while the supervisor serves."""

import ssl
from pathlib import Path

import trustme

from fakes.supervisor_process import StartMock


def write_pair(directory: Path) -> None:
    """Write a fresh certificate and its key, the key last."""
    pair = trustme.CA().issue_cert("localhost")
    pair.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))
    pair.private_key_pem.write_to_path(str(directory / "key.pem"))


def test_enable_ssl_refresh_reads_renewed_files(tmp_path: Path, start_mock: StartMock) -> None:
    """With vLLM's option new connections get the renewed certificate within seconds, without a signal."""
    write_pair(tmp_path)
    files = ("--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem"))
    supervisor, client = start_mock(*files, "--enable-ssl-refresh", before=("--set", "systemd.ready=listening"))
    supervisor.until_said("listening on", within=30.0)
    before = ssl.get_server_certificate(("127.0.0.1", client.port))
    write_pair(tmp_path)
    supervisor.until_said("new connections use the certificates read just now", within=30.0)
    assert ssl.get_server_certificate(("127.0.0.1", client.port)) not in {before, ""}
