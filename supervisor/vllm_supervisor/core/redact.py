"""Keys and tokens must not show in status, `config show`, evidence or logged command lines."""

import re
from collections.abc import Mapping, Sequence

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_NOT_SECRET = re.compile(r"tokenizer|keep_?alive|ssl_?keyfile|max_\w*tokens", re.IGNORECASE)
# vLLM's options whose values are secret, as its parser spells them, and how few letters name them without doubt.
_SECRET_OPTIONS = {"--api-key": "--api-k", "--hf-token": "--hf-t"}


def is_secret_name(name: str) -> bool:
    """Say whether a variable or key of this name probably holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with the values of secret ones replaced."""
    return {name: REDACTED if is_secret_name(name) else value for name, value in variables.items()}


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return a vLLM command line with the values of secret options replaced, in each of its spellings."""
    shown: list[str] = []
    hiding = False
    for argument in arguments:
        if argument.startswith("-") and argument != "-":
            name, equals, _ = argument.partition("=")
            hiding = _is_secret_option(name)
            shown.append(f"{name}={REDACTED}" if hiding and equals else argument)
        else:
            shown.append(REDACTED if hiding else argument)
    return shown


def _is_secret_option(name: str) -> bool:
    spelled = name.replace("_", "-")
    return any(full.startswith(spelled) and spelled.startswith(least) for full, least in _SECRET_OPTIONS.items())


_IN_TEXT = re.compile(
    r"""(?P<name>\b[\w-]*(?:api[_-]?key|hf[_-]?token|auth[_-]?token|secret|passw(?:or)?d|authorization)[\w-]*["']?\s*[:=\s]\s*)"""
    r"""(?P<value>\[[^\]]*\]|"[^"]*"|'[^']*'|(?:bearer\s+)?[^\s,;}\])]+)""",
    re.IGNORECASE,
)
_BARE = re.compile(r"\b(?:bearer\s+\S+|sk-[\w-]{8,}|hf_\w{8,})", re.IGNORECASE)


def text(line: str) -> str:
    """Return a line the engine printed, with what follows a secret's name, and what looks like a key, replaced."""
    return _BARE.sub(REDACTED, _IN_TEXT.sub(lambda match: match["name"] + REDACTED, line))
