"""Loopback ports for servers of tests, also when several test processes run at once."""

import itertools
import os
import socket

# Below what the kernel gives to sockets that ask for no port: nothing takes one between our look and the server's bind.
_FIRST, _LAST = 10_000, 32_000
_numbers = itertools.count(os.getpid() * 97)  # processes that follow each other begin far apart


def free_port() -> int:
    """Give a port nobody listens on, and each one once."""
    for number in itertools.islice(_numbers, _LAST - _FIRST):
        port = _FIRST + number % (_LAST - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no loopback port from {_FIRST} to {_LAST} is free")
