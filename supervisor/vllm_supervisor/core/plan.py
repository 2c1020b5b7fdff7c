"""Everything a command line resolved to, before anything is started.

Rules:
* A plan is complete: whoever runs it reads no option, no variable and no configuration file again.
* Secrets are not part of its printed form.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_supervisor.core.address import Address, TcpAddress
from vllm_supervisor.core.config_sections import Config
from vllm_supervisor.core.cors import Cors
from vllm_supervisor.core.engine_command import EngineCommand, EngineKind
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.vllm_args import VllmOptions

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", re.ASCII)  # it is a directory, and part of a socket's path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The front door's TLS, as vLLM's options name it. `cert_reqs`: 0 none, 1 optional, 2 required."""

    certfile: str
    keyfile: str | None  # None: the key stands in `certfile`
    ca_certs: str | None
    cert_reqs: int
    ciphers: str | None
    refresh: bool  # read the files again when they change


@dataclass(frozen=True, slots=True)
class Plan:
    """What `serve`, `serve` with the stand-in, or `run` shall do."""

    config: Config
    origins: Mapping[str, str]
    name: str
    kind: EngineKind
    command: EngineCommand
    environ: Mapping[str, str] = field(repr=False)  # ours, which the engine's is made from
    path_first: str  # directory for the head of the engine's PATH, or empty
    listeners: tuple[Address, ...]  # none: a node without an HTTP front, which is watched over and nothing else
    tls: TlsFiles | None
    cors: Cors | None  # as vLLM's options have it
    trusted_proxies: str  # whose X-Forwarded-For counts, as uvicorn's FORWARDED_ALLOW_IPS has it
    root_paths: tuple[str, ...]  # prefixes the engine may be asked under
    api_key: str | None = field(repr=False)  # one the engine accepts; None: it asks for none
    model: str  # the name clients use, or empty where we cannot know it
    options: VllmOptions | None  # None for `run`
    engine_keep_alive_s: float  # how long the engine keeps an idle connection
    idle_timeout_s: float  # how long we keep one of a client's
    run_dir: Path
    state_dir: Path
    doubts: tuple[str, ...]  # what was ignored and probably meant
    port_option: str  # the one whose port names the instance and its directories; empty: something else names them


@dataclass(frozen=True, slots=True)
class Holder:
    """The supervisor that holds a state directory, as it says itself."""

    name: str
    pid: int
    run: str

    def __str__(self) -> str:
        """Name it for a sentence."""
        return f"the supervisor {self.name!r} (pid {self.pid}, run {self.run})"


def held(holder: Holder | None, sentence: str, *, name: str, port_option: str) -> str:
    """Say to whoever comes second as `name` that its state directory is held, which is `sentence`, and what to do.

    Where both have their name from their port (`Plan.port_option`), the mend is to stop that one, or another port.
    """
    if holder is None or holder.name != name or not port_option:
        return f"{sentence}; use another --name or state_dir"
    stop = f"vllm-supervisor --name {name} stop"
    return f"supervisor {name!r} (pid {holder.pid}) runs already: stop it with {stop}, or choose another {port_option}"


def check_name(name: str) -> str:
    """Return `name` if it can name an instance; UsageError otherwise."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"--name {name}: expected up to 40 letters, digits, dots, underscores or dashes, a letter or digit first"
        )
    return name


def default_name(listener: Address) -> str:
    """Return the instance's name where none is given: the front door's port, or its socket's file name."""
    if isinstance(listener, TcpAddress):
        return str(listener.port)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(listener.path).name).strip("._-")
    return stem[:40] or "default"


def tls_files(options: VllmOptions) -> TlsFiles | None:
    """Return the TLS that `options` ask for, or None for plain HTTP; UsageError for a key without a certificate."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise UsageError("--ssl-keyfile needs --ssl-certfile")
        return None
    if options.ssl_cert_reqs not in {0, 1, 2}:
        raise UsageError(f"--ssl-cert-reqs {options.ssl_cert_reqs}: expected 0, 1 or 2")
    return TlsFiles(
        options.ssl_certfile,
        options.ssl_keyfile,
        options.ssl_ca_certs,
        options.ssl_cert_reqs,
        options.ssl_ciphers,
        options.enable_ssl_refresh,
    )
