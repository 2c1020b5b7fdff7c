"""The engine's environment, made from ours.

Rules:
* What speaks to us alone is taken out: service manager, socket activation, our own configuration. A user's
  `PROMETHEUS_MULTIPROC_DIR` as well: its old counters would outlive an incarnation; vLLM makes a fresh one when it
  needs it.
* `engine.env` has the last word, but for the markers by which a process of ours is found again.
* The engine believes what the front door says of the client (`FORWARDED_ALLOW_IPS`): everything on its private socket,
  where nobody else can speak to it. Whom the user trusts, the front door decides (`core/forwarding.py`).
* The directory of the engine's executable stands first on its PATH: compilers that vLLM calls look for `ninja` there.
* `SPT_NOENV` keeps setproctitle from wiping the markers out of /proc/PID/environ.
"""

from collections.abc import Mapping

from vllm_supervisor.core.errors import UsageError

KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
DEFAULT_KEEP_ALIVE_S = 75  # what vLLM is told where the user says nothing: longer than the pool keeps a connection
UNKNOWN_KEEP_ALIVE_S = 5.0  # of any other engine: the default of uvicorn, Node.js and cpp-httplib

# Whose X-Forwarded-For uvicorn believes, and its default.
TRUSTED_PROXIES = "FORWARDED_ALLOW_IPS"
_DEFAULT_PROXIES = "127.0.0.1"

MARKER_RUN = "VSUP_RUN"
MARKER_INCARNATION = "VSUP_INCARNATION"

_REMOVED = frozenset({"NOTIFY_SOCKET", "PROMETHEUS_MULTIPROC_DIR"})
_REMOVED_PREFIXES = ("WATCHDOG_", "LISTEN_", "VLLM_SUPERVISOR_")
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def build(
    environ: Mapping[str, str],
    extra: Mapping[str, str],
    *,
    run: str,
    incarnation: int,
    unix_socket: bool,
    rpc_directory: str,
    path_first: str,
) -> dict[str, str]:
    """Return the whole environment of one incarnation.

    `extra` is `engine.env`; `unix_socket` says that the engine listens on a private one, not on loopback; `rpc_directory` an existing, short directory for vLLM's inner sockets; `path_first` a directory for the head of
    PATH, or empty.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _REMOVED and not name.startswith(_REMOVED_PREFIXES)
    }
    made = {
        KEEP_ALIVE: str(DEFAULT_KEEP_ALIVE_S),
        **kept,
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",
        "VLLM_RPC_BASE_PATH": rpc_directory,
        **extra,
        **_trust(environ, extra, unix_socket=unix_socket),
        MARKER_RUN: run,
        MARKER_INCARNATION: str(incarnation),
    }
    if path_first:
        path = made.get("PATH", _DEFAULT_PATH)
        made["PATH"] = f"{path_first}:{path}" if path else path_first
    return made


def keep_alive_s(environ: Mapping[str, str], extra: Mapping[str, str]) -> int | None:
    """Return the keep-alive time (seconds) that the user has set for vLLM, or None.

    Raises UsageError for a value that vLLM would refuse as well (vllm/envs.py reads it by `int`).
    """
    text = extra.get(KEEP_ALIVE, environ.get(KEEP_ALIVE))
    if text is None:
        return None
    try:
        seconds = int(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise UsageError(f"{KEEP_ALIVE}={text[:40]!r}: expected whole seconds, 0 or more")
    return seconds


def trusted_proxies(environ: Mapping[str, str], extra: Mapping[str, str]) -> str:
    """Return whose X-Forwarded-For counts, in uvicorn's notation: "*", or addresses and networks with commas between."""
    return extra.get(TRUSTED_PROXIES, environ.get(TRUSTED_PROXIES, _DEFAULT_PROXIES))


def _trust(environ: Mapping[str, str], extra: Mapping[str, str], *, unix_socket: bool) -> dict[str, str]:
    """Let uvicorn believe the front door. A peer on a Unix socket has no address, so only "*" can name it."""
    if unix_socket:
        return {TRUSTED_PROXIES: "*"}
    told = trusted_proxies(environ, extra)
    return {} if told in {_DEFAULT_PROXIES, "*"} else {TRUSTED_PROXIES: f"{told},{_DEFAULT_PROXIES}"}
