"""The websockets package against /echo: `python websocket_sdk.py URL KEY`.

It exchanges messages of many sizes and prints `open`. Then it leaves when its standard input ends, or is closed; it
prints which, and the code.
"""

import sys
import threading

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

URL, KEY = sys.argv[1:3]


def say(words: str) -> None:
    """Print at once."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do it."""
    headers = {"Authorization": f"Bearer {KEY}"}
    at = URL.replace("http", "ws", 1) + "/echo"
    with connect(at, additional_headers=headers, subprotocols=["echo"], max_size=None) as socket:
        assert socket.subprotocol == "echo", socket.subprotocol
        for message in ("Hello", b"\x00\xff", "x" * 70_000, bytes(1_000_000), ""):
            socket.send(message)
            assert socket.recv(timeout=30.0) == message
        assert socket.ping().wait(30.0)
        say("open")

        def leave() -> None:
            sys.stdin.read()
            socket.close()

        threading.Thread(target=leave, daemon=True).start()
        try:
            socket.recv()
        except ConnectionClosed as closed:
            say(
                f"{'closed' if closed.sent is None else 'left'} {closed.rcvd.code if closed.rcvd else 'without a word'}"
            )


main()
