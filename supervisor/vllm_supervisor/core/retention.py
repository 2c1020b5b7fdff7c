"""Which ledger segments may go: by age and by total size, oldest first, never one that is still needed.

Rules:
* Only a prefix is ever removed, so the numbers that stay have no hole and a hole always means lost evidence.
* The first segment that holds an open id ends the prefix; the segment being written is never removed.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the ledger: `size` in bytes, `modified` in seconds since the epoch."""

    number: int
    size: int
    modified: float


def prunable(
    segments: Sequence[Segment], *, oldest_needed: int, now: float, keep_s: float, max_bytes: int
) -> list[int]:
    """List the numbers to remove. `oldest_needed` is the oldest segment with an open id, or the one being written."""
    total = sum(segment.size for segment in segments)
    removed = []
    for segment in sorted(segments, key=lambda segment: segment.number):
        too_old = now - segment.modified > keep_s
        if segment.number >= oldest_needed or not (too_old or total > max_bytes):
            break
        removed.append(segment.number)
        total -= segment.size
    return removed
