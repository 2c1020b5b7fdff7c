"""The fields by which a browser lets a page of another origin read our own answers, as vLLM's own answers carry them.

Rules:
* They follow vLLM's `--allowed-origins`, `--allowed-methods`, `--allowed-headers` and `--allow-credentials`, which it
  gives to Starlette's CORSMiddleware (vLLM 0.32, vllm/entrypoints/serve/middleware/register.py). Without origins there
  are none, as with vLLM.
* A preflight is vLLM's to answer while it is up. While it is not, we answer in its stead: a page whose preflight fails
  is never told why its request was refused.

Source: Fetch standard, "CORS protocol"; Starlette 1.10, starlette/middleware/cors.py.
"""

import re
from dataclasses import dataclass

_EVERY_METHOD = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_ALWAYS_ALLOWED = ("Accept", "Accept-Language", "Content-Language", "Content-Type")
_VISIBLE = re.compile(rb"[!-~]+")
_MAX_AGE_S = 600  # how long a browser may remember a preflight
_PREFLIGHT_VARY = b"Vary: Origin, Access-Control-Request-Method, Access-Control-Request-Headers\r\n"


def field(lines: bytes, name: bytes) -> bytes | None:
    """Return the value of the first field `name` (lower case) in header lines that end with CRLF each, or None."""
    for line in lines.split(b"\r\n"):
        found, colon, value = line.partition(b":")
        if colon and found.lower() == name:
            return value.strip()
    return None


def _origin(lines: bytes) -> bytes | None:
    """Return the Origin; None for what could be no origin, and would break the header lines of whoever repeats it."""
    origin = field(lines, b"origin")
    return origin if origin is not None and _VISIBLE.fullmatch(origin) else None


@dataclass(frozen=True, slots=True)
class Cors:
    """What vLLM's options allow pages of other origins. "*" in `origins`, `methods` or `headers` stands for all."""

    origins: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False

    def fields(self, lines: bytes) -> bytes:
        """Return the header lines for an answer of ours to a request with the header `lines`."""
        origin = _origin(lines)
        if origin is None:
            return b""
        credentials = b"Access-Control-Allow-Credentials: true\r\n" if self.credentials else b""
        if "*" in self.origins and not self.credentials:
            return b"Access-Control-Allow-Origin: *\r\nVary: Origin\r\n"
        if not self._allows(origin):
            return b"Vary: Origin\r\n"
        return b"Access-Control-Allow-Origin: %b\r\n%bVary: Origin\r\n" % (origin, credentials)

    def preflight(self, method: bytes, lines: bytes) -> tuple[int, bytes, bytes] | None:
        """Return status, body and header lines of the answer to a preflight, or None if the request is none."""
        origin, wanted = _origin(lines), field(lines, b"access-control-request-method")
        if method != b"OPTIONS" or origin is None or wanted is None:
            return None
        asked = field(lines, b"access-control-request-headers")
        failures = []
        if not self._allows(origin):
            failures.append("origin")
        methods = _EVERY_METHOD if "*" in self.methods else self.methods
        if wanted.decode("latin-1") not in methods:
            failures.append("method")
        allowed = sorted({*_ALWAYS_ALLOWED, *self.headers})
        shown: bytes | None = ", ".join(allowed).encode("latin-1", "replace")
        if "*" in self.headers:
            shown = asked
        elif asked is not None:
            known = {name.lower() for name in allowed}
            if any(name.strip().lower() not in known for name in asked.decode("latin-1").split(",")):
                failures.append("headers")
        out = _PREFLIGHT_VARY
        if "origin" not in failures:
            any_origin = "*" in self.origins and not self.credentials
            out += b"Access-Control-Allow-Origin: %b\r\n" % (b"*" if any_origin else origin)
        out += b"Access-Control-Allow-Methods: %b\r\n" % ", ".join(methods).encode("latin-1", "replace")
        out += b"Access-Control-Max-Age: %d\r\n" % _MAX_AGE_S
        if shown is not None:
            out += b"Access-Control-Allow-Headers: %b\r\n" % shown
        if self.credentials:
            out += b"Access-Control-Allow-Credentials: true\r\n"
        if failures:
            return 400, f"Disallowed CORS {', '.join(failures)}".encode(), out
        return 200, b"OK", out

    def _allows(self, origin: bytes) -> bool:
        return "*" in self.origins or origin.decode("latin-1") in self.origins
