"""Text of strangers (processes, callers, the engine's output) as it may stand on a terminal and in a log."""


def printable(text: str) -> str:
    """Put a question mark for everything that a terminal might take for an order."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def one_line(text: str, limit: int) -> str:
    """Make at most `limit` printable characters of one line of `text`."""
    return printable(" ".join(text.split())[:limit])
