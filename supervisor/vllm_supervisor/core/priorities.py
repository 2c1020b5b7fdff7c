"""The priority of a line for systemd's journal: `<N>` before it.

Sources: sd-daemon(3) on the prefixes, syslog(3) on the numbers, systemd.exec(5) on SyslogLevelPrefix=.
"""

PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}


def with_priority(text: str, level: str) -> str:
    """Put the prefix before each line of `text`: the journal makes an entry of each."""
    prefix = f"<{PRIORITIES.get(level, PRIORITIES['info'])}>"
    return "\n".join(f"{prefix}{line}" for line in text.split("\n"))
