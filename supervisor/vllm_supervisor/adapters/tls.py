"""TLS of the public address, from the files vLLM's own options name; certificates can change while serving.

Rules:
* Built as uvicorn builds it for vLLM (`uvicorn.config.create_ssl_context`): same files, same meaning of
  `--ssl-cert-reqs` and `--ssl-ciphers`.
* A reload builds a whole new context first; if that fails the old one stays in use. Open connections keep theirs.
"""

import ssl
from pathlib import Path

from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.plan import TlsFiles

_Stamp = tuple[tuple[int, ...], ...]


class Certificates:
    """The context in use, and how to renew it."""

    def __init__(self, files: TlsFiles) -> None:
        """Load `files`; raises SetupError naming the option whose file is at fault."""
        self._files = files
        self._stamp = _stamp(files)
        self._context = _context(files)

    def current(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        return self._context

    def reload(self) -> None:
        """Load the files again for new connections; raises SetupError, and then the old ones stay."""
        stamp = _stamp(self._files)
        self._context = _context(self._files)
        self._stamp = stamp

    def stale(self) -> bool:
        """Say whether a file has changed since it was loaded (what `--enable-ssl-refresh` watches for)."""
        return _stamp(self._files) != self._stamp


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION  # a peer could otherwise make a write wait for a read
    context.set_alpn_protocols(["http/1.1"])
    option = "--ssl-certfile"
    try:
        context.load_cert_chain(files.certfile, files.keyfile, password=_no_password)
        context.verify_mode = ssl.VerifyMode(files.cert_reqs)
        option = "--ssl-ca-certs"
        if files.ca_certs:
            context.load_verify_locations(files.ca_certs)
        option = "--ssl-ciphers"
        if files.ciphers:
            context.set_ciphers(files.ciphers)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise SetupError(f"{option}: {_sentence(files, option, error)}") from error
    return context


def _no_password() -> str:
    """Refuse an encrypted key instead of asking on a terminal that nobody watches."""
    raise ValueError("the key is encrypted, and there is no way to give its password")


def _sentence(files: TlsFiles, option: str, error: Exception) -> str:
    named = {"--ssl-certfile": files.certfile, "--ssl-ca-certs": files.ca_certs, "--ssl-ciphers": files.ciphers}[option]
    key = f" with key {files.keyfile}" if option == "--ssl-certfile" and files.keyfile else ""
    reason = getattr(error, "strerror", None) or str(error)
    return f"cannot use {named}{key}: {reason}"


def _stamp(files: TlsFiles) -> _Stamp:
    """Modification and change time (ns), size and inode of each file, links followed; zeros where it is missing just now."""
    stamps = []
    for path in (files.certfile, files.keyfile, files.ca_certs):
        try:
            status = Path(path).stat() if path else None
        except OSError:
            status = None
        stamps.append((status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino) if status else (0,))
    return tuple(stamps)
