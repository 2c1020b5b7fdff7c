"""Errors whose type says whose fault it was. Each message is one line: what happened, to what, what to do."""


class UserError(Exception):
    """A mistake the user can mend; shown as one line without a traceback. `status` is our exit status."""

    status = 2


class UsageError(UserError):
    """A wrong command line: exit status 2."""


class SetupError(UserError):
    """Configuration or environment: port in use, vLLM not found, directory not writable, lock held. Exit status 78."""

    status = 78


class ConfigError(SetupError):
    """Everything that is wrong with the configuration, all at once: each problem names key, value and the mend."""

    def __init__(self, problems: list[str]) -> None:
        """Keep `problems`, one line each."""
        super().__init__("; ".join(problems))
        self.problems = problems


def is_thread_limit(fault: BaseException) -> bool:
    """Whether `fault` is Python's word for a thread that the kernel refused."""
    return isinstance(fault, RuntimeError) and str(fault).startswith("can't start new thread")
