"""Where the ledgers are that a tool reads, and from when on: `--state-dir`, else the instance's state directory.

Without a name the only ledger is meant; of several, that of the only supervisor that runs, as the other tools mean it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from vllm_supervisor.adapters import directories, ledger_reader
from vllm_supervisor.cli.finding import connect
from vllm_supervisor.cli.planning import GlobalOptions, load_config
from vllm_supervisor.core.accounts import Fold
from vllm_supervisor.core.errors import UsageError, UserError
from vllm_supervisor.core.ledger import DIRECTORY
from vllm_supervisor.core.units import BadValueError, parse_duration

_ANY = "-"  # stands for the instance's name in the path of a state directory; no instance is called so


def ledger_directory(options: GlobalOptions, state_dir: str | None) -> Path:
    """Return the directory of the segments; nothing needs to run. UsageError if there is none, or more than one."""
    if state_dir is not None:
        return _existing(Path(state_dir).expanduser().absolute())
    configured = load_config(options).config.state_dir
    pattern = directories.state_directory(configured, options.environ, _ANY)
    if pattern.name != _ANY:
        return _existing(pattern)
    found = sorted(path.parent.name for path in pattern.parent.glob(f"*/{DIRECTORY}"))
    if options.name is not None:
        return _existing(pattern.parent / options.name, found)
    return _existing(pattern.parent / chosen(found, lambda: _running(options), pattern.parent))


def chosen(names: Sequence[str], running: Callable[[], str | None], place: Path) -> str:
    """Return whose ledger of those in `place` is meant. `running`: the name of the only supervisor that runs, or None.

    It is asked only if there are several. Raises UsageError if there is no ledger, or no single one that is meant.
    """
    if not names:
        raise UsageError(f"no ledger in {place}; say where by --state-dir")
    if len(names) == 1:
        return names[0]
    name = running()
    if name is not None and name in names:
        return name
    raise UsageError(f"several ledgers in {place}: {', '.join(names)}; choose by --name")


def _running(options: GlobalOptions) -> str | None:
    try:
        return str(connect(options).get("/status").get("name"))
    except UserError:
        return None


def _existing(state: Path, beside: Sequence[str] = ()) -> Path:
    """Return the directory of the segments in `state`; UsageError if there is none. `beside`: the names that have one."""
    directory = state / DIRECTORY
    try:
        if directory.is_dir():
            return directory
    except PermissionError:
        raise UsageError(f"the ledger {directory} may not be read by this user") from None
    known = f" (there are: {', '.join(beside)})" if beside else ""
    raise UsageError(f"no ledger in {state}{known}; say where by --state-dir")


def read_fold(directory: Path, since: str = "") -> Fold:
    """Fold the whole ledger; `since` is an `at` stamp. UsageError if the directory cannot be listed."""
    with readable(directory):
        return ledger_reader.fold(directory, since=since)


@contextmanager
def readable(directory: Path) -> Iterator[None]:
    """Turn the error of a directory that cannot be listed into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"the ledger {directory} cannot be read: {error.strerror}; say where by --state-dir") from None


def since_stamp(text: str | None, now: datetime) -> str:
    """Turn `--since` into an `at` stamp: a duration back from now, or a time in ISO 8601 (UTC if it names no zone)."""
    if text is None:
        return ""
    try:
        moment = now - timedelta(seconds=parse_duration(text))
    except (BadValueError, OverflowError):
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(f'--since {text}: expected a duration such as "1h", or a time in ISO 8601') from None
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
