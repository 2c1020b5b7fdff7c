"""An engine that loads in its own way for a while and then is the mock engine: `quiet_engine.py SIGN SECONDS ARG...`.

SIGN says what it shows meanwhile: lines of some format, bytes read, growing memory, a spinning loop, or nothing.
"""

import itertools
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

STEP = 0.25  # seconds
CHUNK = 4 << 20  # bytes a step: far above what counts


def stamp() -> str:
    """Give the time as RFC 3339 has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"


def say(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show(sign: str, number: int, kept: list[bytearray]) -> None:
    """Show one step of a load."""
    match sign:
        case "plain":
            say(f"load_tensors: layer {number} assigned to device CPU")
        case "rfc3339":
            say(f"{stamp()} INFO loader: layer {number}")
        case "json":
            say(json.dumps({"ts": stamp(), "level": "info", "msg": f"layer {number}"}))
        case "warnings":
            say(f"WARNING 11-29 21:14:50 [loader.py:1] no tuned kernel for layer {number}")
        case "heartbeat":
            say(f"{stamp()} INFO waiting for the other rank")
        case "io":
            with Path("/dev/zero").open("rb", buffering=0) as file:
                file.read(CHUNK)
        case "memory":
            kept.append(bytearray(b"x" * 2 * CHUNK))
        case "nothing":
            pass


def main() -> None:
    """Load, then become the mock engine."""
    sign, seconds, *arguments = sys.argv[1:]
    kept: list[bytearray] = []
    until = time.monotonic() + float(seconds)
    for number in itertools.count():
        if time.monotonic() >= until:
            break
        if sign != "spin":
            show(sign, number, kept)
            time.sleep(STEP)
    argv = [sys.executable, "-m", "vllm_supervisor.mock", *arguments]
    os.execv(sys.executable, argv)  # noqa: S606 - no shell is wanted


main()
