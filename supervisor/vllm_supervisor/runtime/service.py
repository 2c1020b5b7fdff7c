"""Keep the service manager informed, and prove to its watchdog that our own loop runs."""

from collections.abc import Callable
from typing import Literal

import trio

from vllm_supervisor.adapters import clock
from vllm_supervisor.adapters.sd_notify import Notifier
from vllm_supervisor.core import service_manager
from vllm_supervisor.core.lifecycle import State
from vllm_supervisor.core.service_manager import Told


class ServiceManager:
    """Says what is new; nothing is sent where nobody listens."""

    def __init__(
        self,
        notifier: Notifier,
        *,
        ready_when: Literal["engine", "listening"],
        sentence: Callable[[State], str],
        stop_takes_s: Callable[[State], float],
    ) -> None:
        """`sentence` is what `systemctl status` shows; `stop_takes_s` how long the stop may take, in seconds."""
        self._notifier = notifier
        self._ready_when = ready_when
        self._sentence = sentence
        self._stop_takes_s = stop_takes_s
        self._told = Told()

    def after(self, state: State) -> None:
        """Say what the new state, or the passing of time, makes new."""
        if not self._notifier.enabled:
            return
        self._told, said = service_manager.tell(
            self._told,
            state,
            sentence=self._sentence(state),
            ready_when=self._ready_when,
            stop_takes_s=self._stop_takes_s(state),
            now=clock.monotonic(),
        )
        self._notifier.send(*said)

    def reloading(self) -> None:
        """Say that a reload begins."""
        self._notifier.send(*service_manager.reloading(self._told, clock.monotonic()))

    def reloaded(self) -> None:
        """Say that it is over."""
        self._notifier.send(*service_manager.reloaded(self._told))

    async def feed_watchdog(self) -> None:
        """Ping at half the interval systemd asked for; returns at once where it asked for none."""
        if self._notifier.watchdog_s is None:
            return
        while True:
            self._notifier.send("WATCHDOG=1")
            await trio.sleep(self._notifier.watchdog_s / 2)
