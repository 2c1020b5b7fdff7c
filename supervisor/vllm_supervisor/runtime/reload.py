"""What changes at run time: the front door's certificates, and the mind of a parked engine.

Rules:
* A reload that fails changes nothing: the certificates in use stay, and the log says what is wrong with the new ones.
* Everything else in the configuration needs a restart; a parked engine is tried again, since somebody has mended
  something.
* Files that change one after the other are tried each second until they fit each other; that is told once.
* Each reload that is asked for says what came of it, also where there was nothing to do.
"""

from collections.abc import Callable

from vllm_supervisor.adapters.tls import Certificates
from vllm_supervisor.core import facts
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.lifecycle import Node, State
from vllm_supervisor.runtime.service import ServiceManager

NOTHING = (
    "nothing to reload: no certificates are used and no engine is parked; all else takes a restart of the supervisor"
)


class Reload:
    """Does a reload when asked, and, with vLLM's `--enable-ssl-refresh`, when a file of the certificates changes."""

    def __init__(
        self,
        certificates: Certificates | None,
        *,
        refresh: bool,
        service: ServiceManager,
        state: Callable[[], State],
        tell: Callable[[Fact], None],
        say: Callable[[str, str, str], None],
    ) -> None:
        """`say` takes an event, its sentence and its level."""
        self._certificates = certificates
        self._refresh = refresh
        self._service = service
        self._state = state
        self._tell = tell
        self._say = say
        self._complained = False  # of the files as they are: half of a pair is looked at again each second

    def asked(self, by: str) -> None:
        """Reload now, for `by`."""
        self._service.reloading()
        self._complained = False
        self._read_certificates()
        parked = self._state().node is Node.PARKED
        if self._certificates is None and not parked:
            self._say("reload", NOTHING, "info")
        if parked:
            self._tell(facts.RestartRequested(by, "a reload tries a parked engine again"))
        self._service.reloaded()

    def tick(self) -> None:
        """Look whether a certificate has been renewed, where that was asked for."""
        if self._refresh and self._certificates is not None and self._certificates.stale():
            self._read_certificates()

    def _read_certificates(self) -> None:
        if self._certificates is None:
            return
        try:
            self._certificates.reload()
        except SetupError as problem:
            if not self._complained:
                self._say("reload_failed", f"the certificates in use stay: {problem}", "warning")
            self._complained = True
            return
        self._complained = False
        self._say("certificates", "new connections use the certificates read just now", "info")
