"""Other programs on the machine: who holds memory, and which vLLM servers have no supervisor."""

import pytest

from vllm_supervisor.core.memory import GIB
from vllm_supervisor.core.neighbours import (
    Neighbour,
    Process,
    Server,
    address,
    bare_servers,
    biggest,
    named,
    parse_status,
    serve_arguments,
)


def line(command: str) -> bytes:
    """Write a command line as /proc shows it."""
    return command.replace(" ", "\0").encode() + b"\0"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve m --port 9", ["m", "--port", "9"]),
        ("/opt/v/bin/vllm serve m", ["m"]),
        ("/opt/v/bin/python /opt/v/bin/vllm serve m", ["m"]),
        ("/usr/bin/python3.12 -u -X dev /opt/v/bin/vllm serve m", ["m"]),
        ("python -m vllm.entrypoints.openai.api_server --model m", ["--model", "m"]),
        ("python3 -m vllm.entrypoints.cli.main serve m", ["m"]),
        ("python3 -m vllm.entrypoints.cli.main bench latency", None),
        ("python3 -m other vllm serve", None),
        ("vllm bench serve", None),
        ("vllm", None),
        ("bash -c vllm serve m", None),
        ("grep vllm serve", None),
        ("vllm-supervisor serve m", None),
        ("VLLM::EngineCore", None),
        ("", None),
    ],
)
def test_a_server_is_told_by_its_command_line(command: str, expected: list[str] | None) -> None:
    """`vllm serve` in its spellings, with or without the interpreter; nothing that only speaks of it."""
    assert serve_arguments(line(command)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("m", ("", 8000)),
        ("m --port 9", ("", 9)),
        ("m --port=9 --host 10.0.0.1", ("10.0.0.1", 9)),
        ("m --uds /x.sock --port 9", ("", None)),
        ("m --config x.yaml", ("", None)),
        ("m --config x.yaml --port 9", ("", 9)),
        ("m --port nine", ("", None)),
        ("m --port", ("", None)),
    ],
)
def test_where_it_listens(arguments: str, expected: tuple[str, int | None]) -> None:
    """As vLLM reads its options; what may stand in a file is not known."""
    assert address(arguments.split()) == expected


US = 10


def test_servers_of_supervisors_are_none_of_ours_to_warn_of() -> None:
    """The mark tells them, or the socket where the environment may not be read; our own tree is left out."""
    table = [
        Process(20, 1, "vllm", 1 * GIB, line("vllm serve a --port 9"), b"HOME=/\0"),
        Process(21, 20, "VLLM::EngineCor", 30 * GIB, line("VLLM::EngineCore")),
        Process(22, 20, "vllm", 0, line("vllm serve a --port 9"), b"HOME=/\0"),
        Process(30, 1, "vllm", GIB, line("vllm serve b"), b"VSUP_INSTANCE=x\0"),
        Process(40, 1, "vllm", GIB, line("vllm serve c --uds /run/x/engine-0a1b2c3d-1/sock")),
        Process(50, 1, "vllm", GIB, line("vllm serve d --uds /run/x/other.sock")),
        Process(60, 1, "vllm", GIB, line("vllm serve e"), None, here=False),
        Process(US, 1, "python", GIB, line("vllm-supervisor serve f")),
        Process(11, US, "vllm", GIB, line("vllm serve f"), b""),
        Process(70, 1, "bash", 0, line("bash")),
    ]
    assert bare_servers(table, US, {21: 40 * GIB}) == (
        Server(20, "", 9, 71 * GIB),
        Server(50, "", None, GIB),
        Server(60, "", 8000, GIB, here=False),
    )
    assert str(Server(20, "", 9, 71 * GIB)) == "vllm serve (pid 20, port 9, 71.0 GiB)"


def test_who_holds_most_is_named() -> None:
    """The three largest with what the GPU's driver counts, not ours, nothing small."""
    table = [
        Process(1, 0, "init", GIB // 4),
        Process(2, 1, "VLLM::EngineCor", GIB, b"VLLM::EngineCore\0"),
        Process(3, 1, "big", 5 * GIB),
        Process(4, 1, "small", 4 * GIB),
        Process(5, 1, "less", 3 * GIB),
        Process(US, 1, "us", 99 * GIB),
        Process(11, US, "engine", 99 * GIB),
    ]
    found = biggest(table, US, {2: 37 * GIB})
    assert found == (
        Neighbour("VLLM::EngineCore", 2, 38 * GIB),
        Neighbour("big", 3, 5 * GIB),
        Neighbour("small", 4, 4 * GIB),
    )
    assert named(found[:2]) == "VLLM::EngineCore (pid 2, 38.0 GiB), big (pid 3, 5.0 GiB)"


def test_a_status_is_read_for_what_is_its_own() -> None:
    """Anonymous and shared memory count, mapped files do not; a kernel thread has none."""
    status = b"Name:\tVLLM::EngineCor\nPPid:\t7\nRssAnon:\t  2048 kB\nRssFile:\t 9999 kB\nRssShmem:\t 1024 kB\n"
    assert parse_status(status) == ("VLLM::EngineCor", 7, 3 << 20)
    assert parse_status(b"Name:\tkthreadd\nPPid:\t0\n") == ("kthreadd", 0, 0)
    assert parse_status(b"") == ("", 0, 0)
