"""Run a command that the kernel refuses a system call: `refused.py CALL COMMAND [ARG]...`, with a seccomp filter.

CALL is `pidfd_open`, or `unix_socket` for socket(2) and socketpair(2) of AF_UNIX. Nothing but the standard library.
"""

import ctypes
import os
import platform
import socket
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of BPF, on words and constants
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data
_EAFNOSUPPORT, _EPERM = 97, 1
_SOCKET, _SOCKETPAIR = (41, 53) if platform.machine() == "x86_64" else (198, 199)
_PIDFD_OPEN = 434


def program(call: str) -> list[tuple[int, int, int, int]]:
    """Give the filter: (code, jump if true, jump if false, constant) an instruction."""
    if call == "pidfd_open":
        return [
            (_LOAD, 0, 0, _NUMBER),
            (_EQUAL, 0, 1, _PIDFD_OPEN),
            (_RETURN, 0, 0, _ERRNO | _EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    return [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 1, 0, _SOCKET),
        (_EQUAL, 0, 3, _SOCKETPAIR),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, socket.AF_UNIX),
        (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]


def refuse(call: str) -> None:
    """Install the filter for this process and all below it."""
    code = [struct.pack("HBBI", *one) for one in program(call)]
    instructions = ctypes.create_string_buffer(b"".join(code))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    refuse(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # the command is the test's own
