"""Signals to us become facts, by the table of `core.signal_policy`; each is said with its sender."""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from vllm_supervisor.adapters.child import owned
from vllm_supervisor.adapters.reaper import Reaper
from vllm_supervisor.adapters.signals import SignalReceived, Signals
from vllm_supervisor.core import facts
from vllm_supervisor.core.facts import Fact
from vllm_supervisor.core.lifecycle import State
from vllm_supervisor.core.signal_names import signal_name
from vllm_supervisor.core.signal_policy import Action, Condition, decide


@dataclass(frozen=True, slots=True)
class Hearing:
    """What a signal can lead to. `forward` sends one to the engine's main process and says whether there was one."""

    state: Callable[[], State]
    tell: Callable[[Fact], None]
    say: Callable[[str, str], None]  # an event and its sentence
    forward: Callable[[int], bool]
    evidence: Callable[[str], None]
    reload: Callable[[str], None]  # for whom


async def take_signals(
    signals: Signals, hearing: Hearing, *, hangs_up: bool, hangup_ignored: bool, forwarded: tuple[str, ...]
) -> None:
    """Take signals until cancelled; SIGCHLD reaps orphans."""
    reaper = Reaper(owned)
    while True:
        for one in await signals.receive():
            if one.signum == signal.SIGCHLD:
                reaper.reap()
                continue
            held = {
                Condition.IGNORED_AT_START: one.signum == signal.SIGHUP and hangup_ignored,
                Condition.TERMINAL: hangs_up,
                Condition.HASTENED: hearing.state().drain.stops > 1,
                Condition.LISTED: signal_name(one.signum) in forwarded,
            }
            _act(one, hearing, frozenset(condition for condition, holds in held.items() if holds))


def _act(one: SignalReceived, hearing: Hearing, conditions: frozenset[Condition]) -> None:
    name = signal_name(one.signum)
    command = f", {one.command}" if one.command else ""
    sender = "the kernel or a terminal" if one.pid is None else f"pid {one.pid} (uid {one.uid}{command})"
    match decide(name, hearing.state().phase, conditions):
        case Action.STOP | Action.HASTEN | Action.KILL:
            hearing.tell(facts.StopRequested(f"{name} from {sender}", one.signum))
        case Action.FORWARD:
            sent = "passed on to the engine" if hearing.forward(one.signum) else "not passed on: no engine runs"
            hearing.say("signal", f"{name} from {sender} was {sent}")
        case Action.EVIDENCE:
            hearing.say("signal", f"{name} from {sender}: writing an evidence bundle")
            hearing.evidence(f"asked for by {name} from {sender}")
        case Action.RELOAD:
            hearing.say("signal", f"{name} from {sender}: reloading what can change at run time")
            hearing.reload(f"{name} from {sender}")
        case Action.REOPEN_LOGS:
            hearing.say("signal", f"{name} from {sender}: our log goes to standard error, nothing to reopen")
        case Action.IGNORE:
            hearing.say("signal", f"{name} from {sender} was ignored")
