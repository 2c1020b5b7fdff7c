"""Which running supervisor a tool speaks to: `--name`, else the only one found in the places of the run directory."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import click

from vllm_supervisor.adapters import closed_instances, directories, lock, ports
from vllm_supervisor.adapters.control_client import ControlClient, ControlError, NotRunningError, choose
from vllm_supervisor.cli.planning import GlobalOptions, load_config
from vllm_supervisor.core import instances
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.instances import Locked, Reached


def connect(options: GlobalOptions, *, acts: bool = False) -> ControlClient:
    """Return a connection to it; NotRunningError when none runs, UsageError when several do and none is named.

    ControlError when the one that runs is another user's and closed to us. `acts`: the tool changes something, so that
    without a name no other supervisor may be known, and the one is told.
    """
    config = load_config(options).config
    found = directories.control_sockets(config.run_dir, options.environ)
    places = directories.control_places(config.run_dir, options.environ)
    # A run directory of one's own choice need not be called as the instance is, so it is taken at its word.
    name = None if config.run_dir else options.name
    try:
        path = choose(found, name, places)
    except NotRunningError as fault:
        locked = [one for one in _locked(options, config.state_dir) if options.name in (None, *_names(one))]
        if locked and not config.run_dir:
            raise NotRunningError(instances.unreachable(locked)) from None
        closed = closed_instances.find(places, name)
        raise fault if closed is None else ControlError(str(closed)) from None
    if name is None and not config.run_dir and not options.environ.get("RUNTIME_DIRECTORY"):
        _without_a_name(Reached(path.parent.name, _pid(path)), _locked(options, config.state_dir), acts=acts)
    return ControlClient(path)


def _without_a_name(reached: Reached, locked: list[Locked], *, acts: bool) -> None:
    beside = instances.others(reached, locked)
    if beside and acts:
        raise UsageError(instances.ambiguous(reached, beside))
    if beside:
        click.echo(instances.also(beside), err=True)
    elif acts:
        click.echo(f"supervisor {reached.name} (pid {reached.pid}):", err=True)


def _locked(options: GlobalOptions, state_dir: str) -> list[Locked]:
    return lock.living(directories.state_directories(state_dir, options.environ))


def _names(one: Locked) -> tuple[str, str]:
    return one.holder.name, one.state_dir.name


def _pid(path: Path) -> int:
    """Return the pid of whoever listens on a socket, or 0."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            return ports.listener_pid(probe)
        except OSError:
            return 0


@contextlib.contextmanager
def expected_form() -> Iterator[None]:
    """Turn what a block raises on an answer of another form into one sentence: whoever gave it is not of our version."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as fault:
        raise ControlError(
            f"the answer has not the expected form ({type(fault).__name__}): the supervisor is of another version, or none"
        ) from fault
