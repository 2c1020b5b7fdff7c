"""Whether a descriptor is connected to systemd's journal.

Source: systemd.exec(5) on JOURNAL_STREAM.
"""

import os
from collections.abc import Mapping


def connected(environ: Mapping[str, str], fd: int = 2) -> bool:
    """Whether `fd` is the stream to the journal that JOURNAL_STREAM names as device and inode, and no redirection of it."""
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
