"""The one place that reads the wall clock, for stamps only; everything else counts monotonic seconds."""

import time
from datetime import UTC, datetime

monotonic = time.monotonic


def stamp() -> str:
    """Now, as UTC in ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
