"""How many file descriptors we may have open, raised as far as this user may.

Systemd, shells and containers commonly give a soft limit of 1024 for the sake of programs that use select(2), and a far
higher hard limit for those that ask (systemd's NEWS for version 240). vLLM raises its own in the same way.

Source of facts: getrlimit(2).
"""

import errno
import os
import resource


def allow(wanted: int) -> int:
    """Raise the soft limit to `wanted` or as near as the hard one allows, never lower it; return what holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    limit = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def in_use() -> tuple[int | None, int | None]:
    """Return how many descriptors are open, and the limit (None: there is none). All are, where not even one is left to count."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = None if soft == resource.RLIM_INFINITY else soft
    try:
        return len(os.listdir("/proc/self/fd")) - 1, limit  # noqa: PTH208 - names alone are wanted; one is the listing's own
    except OSError as fault:
        return (limit if fault.errno in {errno.EMFILE, errno.ENFILE} else None), limit
