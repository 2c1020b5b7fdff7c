"""The run directory and the control socket in it, made at the start and made again when somebody removes them.

Rules:
* A logout that takes /run/user/UID away, or a sweeper of /tmp, must not cost an engine: tools find us again within a
  second, and the next engine has a place for its sockets.
* Where the place itself cannot be made again, the next place in which tools look is taken (see adapters/directories.py).
* Callers that are being answered on a control socket that was removed are answered to the end.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import trio

from vllm_supervisor.adapters import control_access, directories, ports
from vllm_supervisor.adapters.control_server import Server
from vllm_supervisor.core.address import UnixAddress
from vllm_supervisor.core.errors import SetupError
from vllm_supervisor.core.plan import Plan


class RunDirectory:
    """The run directory of one run; `path` is where it is just now."""

    def __init__(self, plan: Plan) -> None:
        """Make it, and listen on the control socket in it. Raises SetupError."""
        self._plan = plan
        self._told = ""
        self._serve: Callable[[socket.socket], None] | None = None
        self.path = plan.run_dir
        directories.prepare_run_directory(plan.run_dir, trusted=plan.config.trust_directories)
        try:
            self._listener = self._listen()
        except SetupError:
            self._leave()
            raise

    def _listen(self) -> socket.socket:
        path = self.path / directories.CONTROL_SOCKET
        listener = ports.listen(UnixAddress(str(path)), mode=0o600)
        try:
            self._open_to_group()
            self._inode = path.lstat()
        except (SetupError, OSError):
            listener.close()
            path.unlink(missing_ok=True)
            raise
        return listener

    def _open_to_group(self) -> None:
        if self._plan.config.control.group:
            control_access.open_to_group(self.path / directories.CONTROL_SOCKET, self._plan.config.control.group)

    def serve(self, nursery: trio.Nursery, server: Callable[[socket.socket], Server]) -> None:
        """Answer on the control socket, and on each that takes its place, each with a `server` of its own."""
        self._serve = lambda listener: nursery.start_soon(server(listener).run)
        self._serve(self._listener)

    def missing(self) -> str:
        """Say what of it is gone, or ""."""
        try:
            if os.path.samestat((self.path / directories.CONTROL_SOCKET).lstat(), self._inode):
                return ""
        except OSError:
            pass
        return f"control socket of {self.path}" if self.path.is_dir() else f"run directory {self.path}"

    def restore(self) -> tuple[str, str, str] | None:
        """Make again what is gone. Return (event, sentence, level) if there is anything to be said that is new."""
        gone = self.missing()
        if not gone:
            self._told = ""
            return None
        old, before = self._listener, self.path
        try:
            self.path = self._made_again()
            self._listener = self._listen()
        except (SetupError, OSError) as fault:
            self.path = before
            said = f"the {gone} was removed and cannot be made again: {fault}; tools cannot reach this supervisor"
            news = None if said == self._told else ("run_directory_lost", said, "error")
            self._told = said
            return news
        if self._serve is not None:
            self._serve(self._listener)
        trio.lowlevel.notify_closing(old)
        old.close()
        self._told = ""
        where = "" if self.path == before else f" as {self.path}"
        return "run_directory_restored", f"the {gone} was removed; it was made again{where}", "warning"

    def for_sockets(self) -> Path | None:
        """Return the directory for an engine's sockets, made again if it has to be; None: there is none to be had."""
        with suppress(SetupError, OSError):
            # Also where it is there: somebody else may have made it.
            directories.prepare_run_directory(self.path, trusted=self._plan.config.trust_directories)
            if not self.missing():
                self._open_to_group()
            return self.path
        with suppress(SetupError, OSError):
            self.path = self._made_again()
            return self.path
        return None

    def _made_again(self) -> Path:
        config, plan = self._plan.config, self._plan
        return directories.prepare_again(
            plan.run_dir, config.run_dir, plan.environ, plan.name, trusted=config.trust_directories
        )

    def close(self) -> None:
        """Take the control socket away, and the directory if it is one of ours and empty."""
        self._listener.close()
        if not self.missing():
            with suppress(OSError):
                (self.path / directories.CONTROL_SOCKET).unlink()
        self._leave()

    def _leave(self) -> None:
        for path in {self.path, self._plan.run_dir}:
            directories.leave_run_directory(path, self._plan.config.run_dir, self._plan.environ)
