"""Reads the beacon files of the engine's processes, and says what environment makes the engine write them.

Rules:
* Reading takes no lock: the newer of the two records whose checksum holds is the sample; none holds: no sample.
* Read, not mapped: a file that is cut shorter meanwhile is a record that does not hold, where a mapping is a SIGBUS.
* A file is ours if it is a regular file of our own user, of the right size and layout, written by a living process
  that carries the pid in it. Everything else in the directory is ignored, without a word.
* Request events are consumed in order, those of a writer that has died included. Whatever the writer overwrote before
  we came is counted as lost, never guessed.
* The directory belongs on a tmpfs: a page of a disk file may block its writer, which is the engine.
"""

import os
import stat
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from vllm_supervisor.beacon import vsup_beacon as layout
from vllm_supervisor.core.samples import BeaconSample, EventKind, RequestEvent

PLUGIN = "vsup_beacon"
PLUGIN_DIR = Path(layout.__file__).parent
_KINDS = {layout.ADDED: EventKind.ADDED, layout.FINISHED: EventKind.FINISHED}
# The most events taken in one call, so that a burst never holds the loop for long (about 4 µs each).
EVENTS_AT_ONCE = 512


def environment(directory: Path, user: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the engine's environment `user` so that its beacons appear in `directory`.

    Ours comes first on PYTHONPATH and the user's own stays behind it. VLLM_PLUGINS is a filter: where it is set, our
    name joins it; where it is not set, setting it would switch every other plugin off.
    """
    path = user.get("PYTHONPATH", "")
    added = {
        layout.VARIABLE: str(directory),
        "PYTHONPATH": f"{PLUGIN_DIR}{os.pathsep}{path}" if path else str(PLUGIN_DIR),
    }
    plugins = user.get("VLLM_PLUGINS")
    if plugins is not None:
        names = [name for name in plugins.split(",") if name]
        added["VLLM_PLUGINS"] = ",".join([*names, PLUGIN] if PLUGIN not in names else names)
    return added


class _File:
    """One beacon file, open."""

    def __init__(self, path: Path, fd: int, pid: int, engine: int) -> None:
        self.path = path
        self.fd = fd
        self.pid = pid
        self.engine = str(engine)
        self.next_event = 0

    def live(self) -> tuple[int, ...] | None:
        """Return the newest whole record, or None."""
        best: tuple[int, ...] | None = None
        for slot in (0, 1):
            at = layout.LIVE_AT + slot * layout.SLOT_SIZE
            record = self._checked(at, layout.LIVE.size)
            if record is not None:
                values = layout.LIVE.unpack(record)
                if best is None or values[0] > best[0]:
                    best = values
        return best

    def event(self, number: int) -> tuple[int, float, int, int, bytes, bytes] | None:
        """Return the event in the place of `number` (it may be a newer one), or None while it is being written."""
        record = self._checked(layout.RING_AT + number % layout.RING_LENGTH * layout.EVENT_SIZE, layout.EVENT.size)
        return None if record is None else layout.EVENT.unpack(record)

    def _checked(self, at: int, size: int) -> bytes | None:
        try:
            data = os.pread(self.fd, size + layout.CRC.size, at)
        except OSError:
            return None
        if len(data) < size + layout.CRC.size:
            return None
        record = data[:size]
        (crc,) = layout.CRC.unpack_from(data, size)
        return record if zlib.crc32(record) == crc else None

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


class BeaconReader:
    """Reads all beacons of one directory. One reader for each incarnation, whose directory is its own."""

    def __init__(self, directory: Path) -> None:
        """Nothing is opened yet; `directory` need not exist."""
        self._directory = directory
        self._files: dict[str, _File] = {}
        self._last_words: list[RequestEvent] = []  # of writers that have died
        self.lost_events = 0  # overwritten before they were read, of all engines together
        self.faults = 0  # beacons that gave up inside the engine

    def read(self) -> tuple[BeaconSample, ...]:
        """Return one sample for each living EngineCore that reports, by engine label."""
        self._look()
        samples = []
        faults = 0
        for file in self._files.values():
            record = file.live()
            if record is None:
                continue
            (_seq, begun, ended, worked, tokens, open_tokens, prefills, running, waiting, paused, events, gave_up) = (
                record[:12]
            )
            if gave_up:
                faults += 1
                continue
            changed_at, worked_at, open_since = record[12:]
            samples.append(
                BeaconSample(
                    engine=file.engine,
                    pid=file.pid,
                    begun=begun,
                    ended=ended,
                    worked=worked,
                    tokens=tokens,
                    open_tokens=open_tokens,
                    open_prefill=prefills > 0,
                    running=running,
                    waiting=waiting,
                    paused=None if paused == layout.UNKNOWN else paused > 0,
                    events=events,
                    changed_at=changed_at,
                    worked_at=worked_at,
                    open_since=open_since,
                )
            )
        self.faults = faults
        return tuple(sorted(samples, key=lambda sample: sample.engine))

    def events(self) -> list[RequestEvent]:
        """Return the request events since the last call, oldest first, at most `EVENTS_AT_ONCE` an engine."""
        found, self._last_words = self._last_words, []
        for file in self._files.values():
            found += self._events_of(file, EVENTS_AT_ONCE)
        return found

    def _events_of(self, file: _File, limit: int) -> list[RequestEvent]:
        found: list[RequestEvent] = []
        for _ in range(limit):
            event = file.event(file.next_event)
            if event is None or event[0] < file.next_event or event[3] not in _KINDS:
                break  # not written yet
            number, at, output_tokens, kind, status, request_id = event
            if number > file.next_event:
                # The writer went once round the ring: what it overwrote is gone, the rest begins behind it.
                oldest = number - layout.RING_LENGTH + 1
                self.lost_events += oldest - file.next_event
                file.next_event = oldest
                continue
            file.next_event += 1
            found.append(
                RequestEvent(
                    engine=file.engine,
                    at=at,
                    kind=_KINDS[kind],
                    id=request_id.rstrip(b"\0").decode("utf-8", "replace"),
                    status=status.rstrip(b"\0").decode("ascii", "replace"),
                    output_tokens=output_tokens,
                )
            )
        return found

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _look(self) -> None:
        for name, file in list(self._files.items()):
            if not _alive(file.pid):
                self._last_words += self._events_of(file, layout.RING_LENGTH + 1)
                file.close()
                del self._files[name]
        try:
            paths = list(self._directory.glob(f"*{layout.SUFFIX}"))
        except OSError:
            return
        for path in paths:
            if path.name not in self._files:
                opened = _open(path)
                if opened is not None:
                    self._files[path.name] = opened


def _open(path: Path) -> _File | None:
    """Open a beacon file, or None if it is not one of ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    opened = None
    try:
        facts = os.fstat(fd)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_size == layout.FILE_SIZE:
            magic, pid, engine, _created_at = layout.HEADER.unpack(os.pread(fd, layout.HEADER.size, 0))
            if magic == layout.MAGIC and path.name == f"engine-{pid}{layout.SUFFIX}" and _alive(pid):
                opened = _File(path, fd, pid, engine)
    except (OSError, struct.error):  # cut shorter meanwhile
        pass
    if opened is None:
        os.close(fd)
    return opened


def _alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in {"Z", "X"}
