"""Names, TLS and redaction."""

import pytest

from vllm_supervisor.core import redact
from vllm_supervisor.core.address import Address, TcpAddress, UnixAddress
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.plan import TlsFiles, check_name, default_name, tls_files
from vllm_supervisor.core.vllm_args import read


@pytest.mark.parametrize("name", ["a", "8000", "llama-3.1_8B", "x" * 40])
def test_names(name: str) -> None:
    """Letters, digits, dots, underscores and dashes name an instance."""
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a/b", "a b", "x" * 41, "ä", "a\n"])
def test_no_names(name: str) -> None:
    """What could leave its directory, or make a socket's path too long, is no name."""
    with pytest.raises(UsageError, match="expected up to 40 letters"):
        check_name(name)


@pytest.mark.parametrize(
    ("listener", "name"),
    [
        (TcpAddress("", 8000), "8000"),
        (UnixAddress("/run/my model.sock"), "my-model.sock"),
        (UnixAddress("/run/…"), "default"),
        (UnixAddress("/run/" + "x" * 60), "x" * 40),
    ],
)
def test_default_names(listener: Address, name: str) -> None:
    """Without --name the front door's port, or its socket's file, names the instance, always validly."""
    assert default_name(listener) == name
    assert check_name(default_name(listener))


def test_tls_as_vllm_has_it() -> None:
    """A certificate turns TLS on; the key may stand in the same file."""
    assert tls_files(read(["m"], {})) is None
    assert tls_files(read(["m", "--ssl-certfile", "c"], {})) == TlsFiles("c", None, None, 0, None, refresh=False)
    line = "m --ssl-keyfile k --ssl-certfile c --ssl-ca-certs a --ssl-cert-reqs 2 --ssl-ciphers X --enable-ssl-refresh"
    assert tls_files(read(line.split(), {})) == TlsFiles("c", "k", "a", 2, "X", refresh=True)


@pytest.mark.parametrize("line", ["m --ssl-keyfile k", "m --ssl-certfile c --ssl-cert-reqs 3"])
def test_half_tls(line: str) -> None:
    """A key without a certificate, or an unknown demand, is a usage error."""
    with pytest.raises(UsageError, match="--ssl-"):
        tls_files(read(line.split(), {}))


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "VLLM_API_KEY", "db_password", "AWS_SECRET_ACCESS", "X_AUTH", "GOOGLE_CREDENTIALS"]
)
def test_secret_names(name: str) -> None:
    """Variables that by their name hold a secret are not shown."""
    assert redact.environment({name: "hunter2"}) == {name: "<redacted>"}


@pytest.mark.parametrize("name", ["HF_HOME", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "TOKENIZERS_PARALLELISM", "PATH"])
def test_open_names(name: str) -> None:
    """Other variables are shown, names that only sound alike among them."""
    assert redact.environment({name: "v"}) == {name: "v"}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("serve m --api-key k1 k2 --port 9", "serve m --api-key <redacted> <redacted> --port 9"),
        ("m --api_key=k", "m --api_key=<redacted>"),
        ("m --api-k k", "m --api-k <redacted>"),
        ("m --hf_token t -tp 2", "m --hf_token <redacted> -tp 2"),
        (
            "m --tokenizer t --api-server-count 2 --hf-overrides x",
            "m --tokenizer t --api-server-count 2 --hf-overrides x",
        ),
    ],
)
def test_command_lines_without_keys(line: str, shown: str) -> None:
    """A command line is shown without the values of its secret options, however they are spelled."""
    assert redact.command_line(line.split()) == shown.split()
