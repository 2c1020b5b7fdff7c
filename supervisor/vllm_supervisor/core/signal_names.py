"""Linux signals by number and name, as data: the same on x86-64 and arm64 (signal(7))."""

# fmt: off
_NAMES = (
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
)
# fmt: on

SIGNALS: dict[int, str] = {number: f"SIG{name}" for number, name in enumerate(_NAMES, start=1)}
NUMBERS: dict[str, int] = {name: number for number, name in SIGNALS.items()}
LAST_SIGNAL = 64  # real-time signals have no names here


def signal_name(number: int) -> str:
    """Name a signal: "SIGKILL"; a real-time one by its number: "signal 40"."""
    return SIGNALS.get(number, f"signal {number}")
