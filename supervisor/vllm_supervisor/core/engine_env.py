"""The engine's environment, made from ours.

Rules:
* What speaks to us alone is taken out: service manager, socket activation, our own configuration. A user's
  `PROMETHEUS_MULTIPROC_DIR` as well: its old counters would outlive an incarnation; vLLM makes a fresh one when it
  needs it.
* `engine.env` has the last word, but for the markers by which a process of ours is found again.
* The directory of the engine's executable stands first on its PATH: compilers that vLLM calls look for `ninja` there.
* `SPT_NOENV` keeps setproctitle from wiping the markers out of /proc/PID/environ.
"""

from collections.abc import Mapping

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
    keep_alive: int,
    rpc_directory: str,
    path_first: str,
) -> dict[str, str]:
    """Return the whole environment of one incarnation.

    `extra` is `engine.env`; `keep_alive` the seconds the engine keeps an idle connection, unless the user has set them;
    `rpc_directory` an existing, short directory for vLLM's inner sockets; `path_first` a directory for the head of
    PATH, or empty.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _REMOVED and not name.startswith(_REMOVED_PREFIXES)
    }
    made = {
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(keep_alive),
        **kept,
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",
        "VLLM_RPC_BASE_PATH": rpc_directory,
        **extra,
        MARKER_RUN: run,
        MARKER_INCARNATION: str(incarnation),
    }
    if path_first:
        path = made.get("PATH", _DEFAULT_PATH)
        made["PATH"] = f"{path_first}:{path}" if path else path_first
    return made
