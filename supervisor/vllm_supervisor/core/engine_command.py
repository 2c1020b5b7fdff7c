"""The engine's command line for a given private address.

Rules:
* vLLM and the stand-in get the user's words; what names the address and TLS is given our values in place, and what is
  missing is appended, before a `--`. So each option stands there once: vLLM warns of duplicates at each start. Only an
  option of its YAML file stands twice, and vLLM takes ours, which comes later.
* TLS ends at the front door: an empty `--ssl-keyfile=` and `--ssl-certfile=` make the engine serve plain HTTP, and
  leave `--enable-ssl-refresh` nothing to watch (vllm/entrypoints/launchers/utils/ssl.py, uvicorn's `Config.is_ssl`).
* Beside a Unix socket goes `--port 0`: at its end vLLM looks for whoever holds its port, and would print a warning
  with our command line (vllm/entrypoints/launchers/launcher.py, `serve_http`).
* Any other engine (`run`) has the tokens `{host}`, `{port}` and `{uds}` replaced wherever they stand in an argument,
  and nothing else: arguments may hold other braces. Beside a `{uds}` the other two are loopback and a port of the
  engine's own choice, which nobody asks.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_supervisor.core.address import Address, UnixAddress
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.vllm_args import VllmOptions
from vllm_supervisor.core.vllm_words import substitute

_TOKEN = re.compile(r"\{(host|port|uds)\}")


class EngineKind(StrEnum):
    """What the engine is: vLLM, our stand-in for it, or any program of the user's."""

    VLLM = "vllm"
    MOCK = "mock"
    RUN = "run"


class Transport(StrEnum):
    """How we reach the engine: a private Unix socket, or a free port on loopback."""

    UDS = "uds"
    TCP = "tcp"


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start the engine. `program` is the executable (absolute) and what must follow it at once.

    `emptied` are options that the front door took over and that the engine must not have; `transport` is the kind of
    address `argv` takes.
    """

    kind: EngineKind
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    transport: Transport
    emptied: tuple[str, ...] = ()

    def argv(self, address: Address) -> list[str]:
        """Return the command line that makes the engine listen on `address`, of the kind `transport` names."""
        if self.kind is EngineKind.RUN:
            return [*self.program, *(_replaced(argument, address) for argument in self.arguments)]
        return [*self.program, *substitute(self.arguments, dict.fromkeys(self.emptied, "") | _address_options(address))]


def serve_command(
    kind: EngineKind, program: Sequence[str], arguments: Sequence[str], options: VllmOptions, transport: Transport
) -> EngineCommand:
    """Make the command of vLLM or of the stand-in; `arguments` are the user's words after `serve`."""
    taken = {
        "--ssl-keyfile": options.ssl_keyfile,
        "--ssl-certfile": options.ssl_certfile,
        "--ssl-ca-certs": options.ssl_ca_certs,
        "--uds": options.uds if transport is Transport.TCP else None,
    }
    emptied = tuple(name for name, value in taken.items() if value is not None)
    return EngineCommand(kind, (*program, "serve"), tuple(arguments), transport, emptied)


def run_command(program: str, arguments: Sequence[str]) -> EngineCommand:
    """Make the command of any other engine; UsageError when no argument says where it shall listen."""
    named = {token for argument in arguments for token in _TOKEN.findall(argument)}
    if "uds" in named:
        transport = Transport.UDS
    elif "port" in named:
        transport = Transport.TCP
    else:
        raise UsageError(
            "run: no argument says where the engine shall listen; "
            "write {uds}, or {host} and {port}, as in: run -- my-engine --port {port}"
        )
    return EngineCommand(EngineKind.RUN, (program,), tuple(arguments), transport)


def root_paths_in(words: Iterable[str]) -> tuple[str, ...]:
    """Return every value of a `--root-path` in any other engine's command line, in both spellings and abbreviated.

    Which of them counts is the engine's to know, so all do. A command inside one word (`sh -c`) is looked through, too.
    """
    found: list[str] = []
    named = False
    for word in " ".join(words).split():
        name, equals, value = word.partition("=")
        if named:
            found.append(word)
        named = is_root_path(name) and not equals
        if equals and is_root_path(name):
            found.append(value)
    return tuple(path for value in found if (path := value.strip("'\"")))


def is_root_path(option: str) -> bool:
    """Say whether an option's name is `--root-path`, or a beginning of it that argparse and vLLM take for it."""
    return option.startswith("--ro") and "--root-path".startswith(option.replace("_", "-"))


def _address_options(address: Address) -> dict[str, str]:
    if isinstance(address, UnixAddress):
        return {"--port": "0", "--uds": address.path}
    return {"--host": address.host, "--port": str(address.port)}


def _replaced(argument: str, address: Address) -> str:
    if isinstance(address, UnixAddress):
        values = {"uds": address.path, "host": "127.0.0.1", "port": "0"}
    else:
        values = {"host": address.host, "port": str(address.port)}
    return _TOKEN.sub(lambda match: values[match[1]], argument)
