"""The beacon: a vLLM plugin that reports every engine step to a small shared file, for the supervisor to read.

Rules:
* It runs inside the engine, so it never raises, never blocks, never waits and imports nothing but the standard library
  (Python 3.9 to 3.14). Without `VSUP_BEACON_DIR`, or with a Scheduler that looks different, it does nothing at all.
* It is found as an entry point `vllm.general_plugins` of a bare directory on PYTHONPATH. vLLM loads it in every process;
  only the one that makes a Scheduler (EngineCore) gets a file. The scheduler module is wrapped when it is imported, not
  imported here: that would cost the other processes a second at their start.
* `schedule()` returning begins a step, `update_from_output()` returning ends the oldest open one. With async scheduling
  or pipeline parallelism several steps are open at once; EngineCore takes their results in the order it queued them
  (`step_with_batch_queue` in vLLM 0.32), so first begun is first ended.
* A record is written whole, with its checksum, into the older of two slots: a reader needs no lock, and an engine that
  stops in the middle of a write still leaves the record before it. The checksum also covers processors that reorder
  stores. The file is allocated in full at the start, because a full file system would otherwise kill the engine (SIGBUS).
* Times are CLOCK_MONOTONIC seconds, the same in every process of a machine.

Layout, little-endian: HEADER at 0; two LIVE records of SLOT_SIZE bytes at LIVE_AT; RING_LENGTH events of EVENT_SIZE
bytes at RING_AT. LIVE and EVENT are each followed by the CRC-32 of their bytes. Another layout gets another MAGIC.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import mmap
import os
import struct
import sys
import time
import zlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "VSUP_BEACON_DIR"
SUFFIX = ".beacon"
MAGIC = b"vsupbcn1"
HEADER = struct.Struct("<8sQqd")  # magic, pid, engine index, created at
# seq, begun, ended, worked, tokens, open tokens, open prefills, running, waiting, paused, events, faults,
# changed at, worked at, open since
LIVE = struct.Struct("<QQQQQQQQQqQQddd")
EVENT = struct.Struct("<QdQB7x24s128s")  # seq, at, output tokens, kind, status, request id
CRC = struct.Struct("<I")
LIVE_AT = 64
SLOT_SIZE = 128
RING_AT = LIVE_AT + 2 * SLOT_SIZE
RING_LENGTH = 2048
EVENT_SIZE = 192
FILE_SIZE = RING_AT + RING_LENGTH * EVENT_SIZE
ADDED, FINISHED = 1, 2
UNKNOWN = -1  # of `paused`: this vLLM does not say

_MODULE = "vllm.v1.core.sched.scheduler"
_NEEDED = ("schedule", "update_from_output", "add_request", "_free_request", "get_request_counts")
_monotonic = time.monotonic
_crc32 = zlib.crc32


class Beacon:
    """The writer of one file. Its methods may raise; whoever calls them from the engine's side catches everything."""

    def __init__(self, directory: str, engine: int) -> None:
        """Create the file, mode 0600, visible under its name only when it is whole. Raises OSError."""
        pid = os.getpid()
        self.path = Path(directory, f"engine-{pid}{SUFFIX}")
        unfinished = Path(f"{self.path}.new")
        unfinished.unlink(missing_ok=True)  # of a process that had this pid
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, FILE_SIZE)
            self._map = mmap.mmap(fd, FILE_SIZE)
        finally:
            os.close(fd)
        now = _monotonic()
        HEADER.pack_into(self._map, 0, MAGIC, pid, engine, now)
        self._open = deque()  # type: deque[tuple[float, int, int]]  # begun at, tokens, prefill
        self._seq = self._begun = self._ended = self._worked = self._tokens = 0
        self._open_tokens = self._open_prefills = self._running = self._waiting = self._events = self._faults = 0
        self._paused = UNKNOWN
        self._changed_at = self._worked_at = self._open_since = now
        self._publish()
        unfinished.rename(self.path)

    def begun(self, tokens: int, prefill: bool, counts: tuple[int, int]) -> None:
        """Report that a step of `tokens` scheduled tokens has begun; `counts` are (running, waiting)."""
        now = self._changed_at = _monotonic()
        if not self._open:
            self._open_since = now
        self._open.append((now, tokens, prefill))
        self._begun += 1
        self._open_tokens += tokens
        self._open_prefills += prefill
        self._running, self._waiting = counts
        self._publish()

    def ended(self, counts: tuple[int, int]) -> None:
        """Report that the oldest open step has ended; the next one, if any, has the workers from now on."""
        now = self._changed_at = self._open_since = _monotonic()
        _at, tokens, prefill = self._open.popleft()
        self._ended += 1
        self._open_tokens -= tokens
        self._open_prefills -= prefill
        if tokens:
            self._worked += 1
            self._tokens += tokens
            self._worked_at = now
        self._running, self._waiting = counts
        self._publish()

    def event(self, kind: int, request_id: str, status: str, output_tokens: int, counts: tuple[int, int]) -> None:
        """Report that a request was added or has finished. A full ring overwrites its oldest event."""
        data = EVENT.pack(
            self._events,
            _monotonic(),
            output_tokens,
            kind,
            status.encode("ascii", "replace"),
            request_id.encode("utf-8", "replace"),
        )
        at = RING_AT + self._events % RING_LENGTH * EVENT_SIZE
        self._map[at : at + len(data) + 4] = data + CRC.pack(_crc32(data))
        self._events += 1
        self._running, self._waiting = counts
        self._publish()

    def paused(self, paused: bool) -> None:
        """Report that the scheduler was paused or resumed by an operator."""
        self._paused = int(paused)
        self._publish()

    def fault(self) -> None:
        """Report that we gave up: what the file says is no longer kept up."""
        self._faults += 1
        self._publish()

    def _publish(self) -> None:
        self._seq += 1
        data = LIVE.pack(
            self._seq,
            self._begun,
            self._ended,
            self._worked,
            self._tokens,
            self._open_tokens,
            self._open_prefills,
            self._running,
            self._waiting,
            self._paused,
            self._events,
            self._faults,
            self._changed_at,
            self._worked_at,
            self._open_since,
        )
        at = LIVE_AT + (self._seq & 1) * SLOT_SIZE
        self._map[at : at + len(data) + 4] = data + CRC.pack(_crc32(data))


def has_prefill(output: Any, tokens: int) -> bool:
    """Say whether a step computes prompts: those may take minutes where a decode step takes milliseconds."""
    if output.scheduled_new_reqs:
        return True
    if tokens <= len(output.num_scheduled_tokens):
        return False  # one token a request
    cached = output.scheduled_cached_reqs
    # More than one token each: chunks of a prompt (no output yet), a recomputation, or speculative decoding.
    outputs = getattr(cached, "num_output_tokens", None)
    return outputs is None or 0 in outputs or bool(getattr(cached, "resumed_req_ids", ()))


def register() -> None:
    """Entry point: wrap the scheduler now if it is imported already, else when it is."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    with contextlib.suppress(Exception):  # nothing of ours may ever disturb the engine
        module = sys.modules.get(_MODULE)
        if module is not None and hasattr(module, "Scheduler"):
            _wrap(module, directory)
        elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watch(directory))


class _Watch:
    """Waits on the import path for the scheduler module, wraps it once, and is gone."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> Any:
        """Leave every module but one to the finders behind us."""
        if name != _MODULE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = getattr(spec, "loader", None)
        if loader is None:
            return spec
        execute, directory = loader.exec_module, self._directory

        def exec_module(module: Any) -> None:
            execute(module)
            with contextlib.suppress(Exception):  # nothing of ours may ever disturb the engine
                _wrap(module, directory)

        loader.exec_module = exec_module
        return spec


def _wrap(module: Any, directory: str) -> None:
    """Put our reports around the methods of `module.Scheduler`, if they are all there and not ours yet."""
    scheduler = module.Scheduler
    if getattr(scheduler, "_vsup_wrapped", False) or not all(callable(getattr(scheduler, n, None)) for n in _NEEDED):
        return
    scheduler._vsup_wrapped = True  # noqa: SLF001 - the mark is ours
    scheduler._vsup_beacon = None  # noqa: SLF001
    make = scheduler.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes the place of one
        make(self, *args, **kwargs)
        with contextlib.suppress(Exception):  # an engine without a beacon is an engine all the same
            parallel = self.vllm_config.parallel_config
            # The index stays where vLLM resets the rank (data parallelism of a dense model).
            index = getattr(parallel, "data_parallel_index", None)
            self._vsup_beacon = Beacon(directory, parallel.data_parallel_rank if index is None else index)

    scheduler.__init__ = __init__
    scheduler.schedule = _after(scheduler.schedule, _on_schedule)
    scheduler.update_from_output = _after(scheduler.update_from_output, _on_update)
    scheduler.add_request = _after(scheduler.add_request, _on_add)
    scheduler._free_request = _after(scheduler._free_request, _on_free)  # noqa: SLF001 - vLLM has no public hook for it
    if callable(getattr(scheduler, "set_pause_state", None)):
        scheduler.set_pause_state = _after(scheduler.set_pause_state, _on_pause)


def _after(method: Callable[..., Any], report: Callable[..., None]) -> Callable[..., Any]:
    """Return `method` followed by `report(beacon, scheduler, result, arguments)`; a fault in it ends the reports."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        beacon = self._vsup_beacon
        if beacon is not None:
            try:
                report(beacon, self, result, args or tuple(kwargs.values()))
            except Exception:  # noqa: BLE001 - nothing of ours may ever disturb the engine
                _give_up(self, beacon)
        return result

    wrapped.__name__ = getattr(method, "__name__", "wrapped")
    wrapped.__doc__ = method.__doc__
    wrapped.__wrapped__ = method  # type: ignore[attr-defined]
    return wrapped


def _give_up(scheduler: Any, beacon: Beacon) -> None:
    scheduler._vsup_beacon = None  # noqa: SLF001 - the attribute is ours
    with contextlib.suppress(Exception):
        beacon.fault()


def _counts(scheduler: Any) -> tuple[int, int]:
    """Return (running, waiting) requests, without sessions that wait for their client's next input."""
    running, waiting = scheduler.get_request_counts()
    return running, max(0, waiting - getattr(scheduler, "num_waiting_for_streaming_input", 0))


def _on_schedule(beacon: Beacon, scheduler: Any, output: Any, _arguments: tuple[Any, ...]) -> None:
    tokens = output.total_num_scheduled_tokens
    beacon.begun(tokens, has_prefill(output, tokens), _counts(scheduler))


def _on_update(beacon: Beacon, scheduler: Any, _result: Any, _arguments: tuple[Any, ...]) -> None:
    beacon.ended(_counts(scheduler))


def _on_add(beacon: Beacon, scheduler: Any, _result: Any, arguments: tuple[Any, ...]) -> None:
    beacon.event(ADDED, arguments[0].request_id, "", 0, _counts(scheduler))


def _on_free(beacon: Beacon, scheduler: Any, _result: Any, arguments: tuple[Any, ...]) -> None:
    request = arguments[0]
    beacon.event(FINISHED, request.request_id, request.status.name, request.num_output_tokens, _counts(scheduler))


def _on_pause(beacon: Beacon, _scheduler: Any, _result: Any, arguments: tuple[Any, ...]) -> None:
    beacon.paused(arguments[0].name != "UNPAUSED")
