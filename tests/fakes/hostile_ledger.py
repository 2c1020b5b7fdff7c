"""Lines that no supervisor wrote, each with the words that say what is wrong with it."""

GOOD = (
    b'{"t":1.0,"at":"2026-01-01T00:00:00.000Z","boot":"boot1","run":"run1","inc":1,"event":"accepted"'
    b',"id":"run1-900","class":"chat"}\n'
)


def changed(old: str, new: str) -> bytes:
    """Give the good line with something else in one place."""
    assert old.encode() in GOOD
    return GOOD.replace(old.encode(), new.encode())


def event(name: str, fields: str) -> bytes:
    """Give a line of another kind with these fields."""
    return changed('"accepted","id":"run1-900","class":"chat"', f'"{name}",{fields}')


LINES: dict[str, tuple[bytes, str]] = {
    "empty": (b"\n", "it is empty"),
    "zero bytes": (bytes(4096) + b"\n", "NUL bytes"),
    "a zero byte inside": (changed("chat", "ch\0at"), "NUL bytes in it"),
    "no object": (b"[1, 2]\n", "not a whole JSON object"),
    "a text": (b"hello\n", "not a whole JSON object"),
    "half a line": (GOOD[:60] + b"\n", "not a whole JSON object"),
    "two halves": (GOOD[:40] + GOOD, "not JSON"),
    "the end of a line": (GOOD[40:], "not a whole JSON object"),
    "space before it": (b"  " + GOOD, "not a whole JSON object"),
    "CR LF": (GOOD.replace(b"\n", b"\r\n"), "it ends in CR LF: something has converted the file"),
    "a mark of the byte order": (b"\xef\xbb\xbf" + GOOD, "not a whole JSON object"),
    "Latin-1": (changed("chat", "X").replace(b"X", b"\xe4"), "not UTF-8"),
    "1.5 MB": (changed("chat", "x" * 1_500_000), "it is longer than 1 MiB"),
    "3 MB of brackets": (b"[" * 3_000_000 + b"\n", "it is longer than 1 MiB"),
    "brackets": (b"[" * 100_000 + b"\n", "not a whole JSON object"),
    "brackets in an object": (changed('"chat"', "[" * 100_000 + "]" * 100_000), "nested too deep"),
    "objects in an object": (changed('"chat"', '{"a":' * 50_000 + "1" + "}" * 50_000), "nested too deep"),
    "17 deep": (changed('"chat"', '"chat","more":' + "[" * 17 + "]" * 17), "nested too deep"),
    "a number of 5,000 digits": (changed('"inc":1', '"inc":' + "1" * 5000), "a number has too many digits"),
    "a number of 4,000 digits": (changed('"inc":1', '"inc":' + "1" * 4000), "inc is not a whole number"),
    "1e400": (changed('"t":1.0', '"t":1e400'), "t is not seconds"),
    "NaN": (changed('"t":1.0', '"t":NaN'), "not JSON"),
    "Infinity": (changed('"t":1.0', '"t":Infinity'), "not JSON"),
    "a field twice": (changed('"inc":1', '"inc":1,"inc":2'), "a field stands twice"),
    "no time": (changed('"t":1.0,', ""), "t is missing"),
    "negative seconds": (changed('"t":1.0', '"t":-1.0'), "t is not seconds"),
    "seconds in words": (changed('"t":1.0', '"t":"1.0"'), "t is not seconds"),
    "true seconds": (changed('"t":1.0', '"t":true'), "t is not seconds"),
    "no such day": (changed("2026-01-01T", "2026-02-31T"), "at is not a UTC time"),
    "a local time": (changed("00.000Z", "00.000 "), "at is not a UTC time"),
    "an Arabic digit": (changed("2026-01-01T", "202\u0666-01-01T"), "at is not a UTC time"),
    "a true incarnation": (changed('"inc":1', '"inc":true'), "inc is not a whole number"),
    "a negative incarnation": (changed('"inc":1', '"inc":-1'), "inc is not a whole number"),
    "half an incarnation": (changed('"inc":1', '"inc":1.5'), "inc is not a whole number"),
    "no incarnation": (changed('"inc":1', '"inc":null'), "inc is not a whole number"),
    "a run of two lines": (changed('"run1"', '"ru\\nn1"'), "run is not a name"),
    "a run of half a character": (changed('"run1"', '"\\ud800"'), "run is not a name"),
    "a nameless run": (changed('"run1"', '""'), "run is not a name"),
    "a run in a list": (changed('"run1"', '["run1"]'), "run is not a name"),
    "a boot that is a number": (changed('"boot1"', "1"), "boot is not a name"),
    "another boot": (changed('"boot1"', '"boot2"'), "it is of another boot than its run run1"),
    "an event that is a number": (changed('"accepted"', "1"), "event is not a name"),
    "an event in a list": (changed('"accepted"', '["accepted"]'), "event is not a name"),
    "an id that is a number": (changed('"run1-900"', "900"), "id is not text"),
    "no id": (changed(',"id":"run1-900"', ""), "id is missing"),
    "a class that is an object": (changed('"chat"', "{}"), "class is not text"),
    "a writer that is a number": (changed('"class"', '"by":1,"class"'), "by is not a name"),
    "a later format": (event("life", '"format":2'), "format is not 1: a later version wrote it"),
    "a pid in words": (event("life", '"pid":"x"'), "pid is not a whole number"),
    "a negative start": (event("life", '"start":-1'), "start is not a whole number"),
    "a release that is a list": (event("life", '"release":[]'), "release is not text"),
    "a segment in words": (event("segment", '"segment":"1"'), "segment is not a whole number"),
    "a place of 20 digits": (event("segment", f'"read_from":{10**20}'), "read_from is not a whole number"),
    "an outcome that is a list": (event("outcome", '"id":"run1-1","outcome":[]'), "outcome is not text"),
    "no outcome": (event("outcome", '"id":"run1-1"'), "outcome is missing"),
    "a negative size": (event("outcome", '"id":"run1-1","outcome":"open","bytes":-1'), "bytes is not a whole number"),
    "a stream in words": (
        event("outcome", '"id":"run1-1","outcome":"open","stream":"no"'),
        "stream is not true or false",
    ),
    "an endless answer": (
        event("outcome", '"id":"run1-1","outcome":"open","duration_s":1e999'),
        "duration_s is not seconds",
    ),
    "a state that is an object": (event("execution", '"id":"run1-1","state":{}'), "state is not text"),
    "no state": (event("execution", '"id":"run1-1"'), "state is missing"),
    "processes that are a number": (
        event("engine", '"what":"x","processes":7'),
        "processes is not a list of processes",
    ),
    "a process that is none": (event("engine", '"processes":[7]'), "processes is not a list of processes"),
    "a process in words": (event("engine", '"processes":[{"pid":"7"}]'), "processes is not a list of processes"),
    "refusals below zero": (event("rejected", '"n":-5'), "n is not a whole number"),
    "lost lines below zero": (event("gap", '"lost":-5'), "lost is not a whole number"),
    "a balance in words": (event("balance", '"accepted":"all"'), "accepted is not a whole number"),
    "states in words": (
        event("balance", '"executions":{"completed":"all"}'),
        "executions is not a table of whole numbers",
    ),
    "settled in words": (event("balance", '"settled":"yes"'), "settled is not true or false"),
}

# What looks as if it were wrong and is not, or is another kind of wrong.
READABLE: dict[str, bytes] = {
    "as we write it": GOOD,
    "an event of a later version": event("weather", '"sun":true'),
    "a field of a later version": changed('"chat"', '"chat","colour":[[1]]'),
    "half a character": changed('"chat"', '"\\ud800"'),
    "what a terminal obeys": changed('"chat"', '"\\u001b[2J"'),
    "the same, undisguised": changed('"chat"', '"\u009b2J"'),
    "without a class": changed(',"class":"chat"', ""),
    "an outcome that is none": event("outcome", '"id":"run1-1","outcome":"lost"'),
    "a state that is none": event("execution", '"id":"run1-1","state":"odd"'),
    "an outcome without an acceptance": event("outcome", '"id":"run1-77","outcome":"completed"'),
    "an id of 60,000 characters": changed("run1-900", "x" * 60_000),
    "a number far ahead": changed("run1-900", "run1-999999999"),
    "spaces inside": GOOD.replace(b'":', b'": ').replace(b'"t": 1.0', b'"t":\t1.0'),
}
