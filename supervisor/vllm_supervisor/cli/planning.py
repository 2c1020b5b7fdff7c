"""From a command line to a `Plan`: the three sources of configuration, vLLM's options, the engine's program, directories.

Whatever is wrong is a UserError that names the option, file or key and the mend; nothing is started here.
"""

import contextlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_supervisor.adapters import config_file, directories, executable, vllm_yaml
from vllm_supervisor.core import engine_env, vllm_args, vllm_words
from vllm_supervisor.core.address import Address, TcpAddress, UnixAddress
from vllm_supervisor.core.config import DEFAULT, Loaded, build
from vllm_supervisor.core.config_sections import Config
from vllm_supervisor.core.engine_command import (
    EngineCommand,
    EngineKind,
    Transport,
    root_paths_in,
    run_command,
    serve_command,
)
from vllm_supervisor.core.errors import UsageError, UserError
from vllm_supervisor.core.plan import Plan, check_name, default_name, tls_files
from vllm_supervisor.core.vllm_args import VllmOptions

SHORTEST_IDLE_S = 1.0  # even where vLLM would keep no connection at all: a new one has to send its first request
NO_FRONT = "headless"  # the name of an instance without a front door


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """The supervisor's own options, and the environment."""

    config: str | None
    sets: tuple[str, ...]
    name: str | None
    engine: str
    environ: Mapping[str, str]


def load_config(options: GlobalOptions) -> Loaded:
    """Read and merge the sources of configuration."""
    file = None if options.config is None else config_file.read(Path(options.config))
    return build(file, options.environ, options.sets, file_name=options.config or "")


def plan_serve(options: GlobalOptions, arguments: Sequence[str]) -> Plan:
    """Resolve `serve ARGUMENTS`, with vLLM or the stand-in."""
    loaded = load_config(options)
    config = loaded.config
    kind = EngineKind(options.engine)
    yaml_path = vllm_args.config_file(arguments)
    entries = None if yaml_path is None else vllm_yaml.read(Path(yaml_path))
    vllm = vllm_args.read(arguments, options.environ, entries)
    if sentence := vllm_args.refusal(vllm):
        raise UsageError(sentence)
    program, path_first = _serve_program(kind, config.engine.command, options.environ)
    if kind is EngineKind.VLLM and vllm.hf_config_path is None:
        executable.check_model(vllm.model)
    command = serve_command(kind, program, arguments, vllm, Transport(config.engine.transport))
    if vllm.has_no_front:
        return _plan(options, loaded, command, path_first=path_first, listener=None, vllm=vllm, roots=())
    listener: Address = UnixAddress(vllm.uds) if vllm.uds is not None else TcpAddress(vllm.host or "", vllm.port)
    roots = () if vllm.root_path is None else (vllm.root_path,)
    return _plan(options, loaded, command, path_first=path_first, listener=listener, vllm=vllm, roots=roots)


def plan_run(options: GlobalOptions, arguments: Sequence[str]) -> Plan:
    """Resolve `run -- ARGUMENTS`."""
    if not arguments:
        raise UsageError("run: no command; write run -- COMMAND [ARG]...")
    loaded = load_config(options)
    program = executable.find(
        arguments[0],
        search_path=options.environ.get("PATH"),
        mend="name a program on PATH, or its path, after `run --`",
    )
    command = run_command(str(program), arguments[1:])
    listener = TcpAddress(loaded.config.listen.host, loaded.config.listen.port)
    roots = root_paths_in([*arguments, *_words_of_files(arguments)])
    return _plan(options, loaded, command, path_first="", listener=listener, vllm=None, roots=roots)


def _words_of_files(arguments: Sequence[str]) -> list[str]:
    """Return as words what stands in the YAML files that a command names as vLLM's does (`--config FILE.yaml`).

    What the files of another engine hold is its own affair, and so is one that cannot be read.
    """
    words: list[str] = []
    for option, path in itertools.pairwise(arguments):
        if option == "--config" and path.endswith((".yaml", ".yml")):
            with contextlib.suppress(UserError):
                words += vllm_words.from_yaml(vllm_yaml.read(Path(path)))
    return words


def _serve_program(kind: EngineKind, command: str, environ: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Return the program and the directory for the head of the engine's PATH."""
    if kind is EngineKind.MOCK:
        return (sys.executable, "-P", "-m", "vllm_supervisor.mock"), ""
    found = executable.find(
        command,
        search_path=environ.get("PATH"),
        mend="install vLLM, or set engine.command to the path of its `vllm` (or try --engine mock)",
    )
    return (str(found),), str(found.parent)


def _plan(
    options: GlobalOptions,
    loaded: Loaded,
    command: EngineCommand,
    *,
    path_first: str,
    listener: Address | None,
    vllm: VllmOptions | None,
    roots: tuple[str, ...],
) -> Plan:
    config = loaded.config
    name = options.name if options.name is not None else NO_FRONT if listener is None else default_name(listener)
    name = check_name(name)
    run_dir, state_dir = _places(config, options.environ, name)
    unnamed = _places(config, options.environ, "")
    by_port = options.name is None and isinstance(listener, TcpAddress)
    by_port = by_port and run_dir != unnamed[0] and state_dir != unnamed[1]  # another port is another instance
    tls = None if vllm is None else tls_files(vllm)
    told = engine_env.keep_alive_s(options.environ, config.engine.env)
    directories.check_length(run_dir)
    directories.prepare_state_directory(state_dir, trusted=config.trust_directories)
    return Plan(
        config=config,
        origins=loaded.origins,
        name=name,
        kind=command.kind,
        command=command,
        environ=options.environ,
        path_first=path_first,
        listeners=() if listener is None else (listener,),
        tls=tls,
        cors=None if vllm is None else vllm.cors,
        trusted_proxies=engine_env.trusted_proxies(options.environ, config.engine.env),
        root_paths=tuple(dict.fromkeys(root for root in (config.engine.root_path, *roots) if root)),
        api_key=_api_key(options, vllm),
        model=vllm.label if vllm else "",
        options=vllm,
        engine_keep_alive_s=_engine_keep_alive(command.kind, told),
        idle_timeout_s=_idle_timeout(loaded, command.kind, told),
        run_dir=run_dir,
        state_dir=state_dir,
        doubts=loaded.doubts,
        port_option=("listen.port" if vllm is None else "--port") if by_port else "",
    )


def _places(config: Config, environ: Mapping[str, str], name: str) -> tuple[Path, Path]:
    """Return the run and the state directory of instance `name`; one that is configured does not follow the name."""
    run_dir = directories.run_directory(config.run_dir, environ, name)
    return run_dir, directories.state_directory(config.state_dir, environ, name)


def _engine_keep_alive(kind: EngineKind, told: int | None) -> float:
    """Return how long (seconds) the engine keeps an idle connection."""
    if kind is EngineKind.RUN:
        return engine_env.UNKNOWN_KEEP_ALIVE_S if told is None else min(told, engine_env.UNKNOWN_KEEP_ALIVE_S)
    return engine_env.DEFAULT_KEEP_ALIVE_S if told is None else told


def _idle_timeout(loaded: Loaded, kind: EngineKind, told: int | None) -> float:
    """Return how long (seconds) an idle client is kept: as its user told vLLM, unless the key itself is set."""
    own = loaded.config.front_door.idle_timeout
    if told is None or kind is EngineKind.RUN or loaded.origins["front_door.idle_timeout"] != DEFAULT:
        return own
    return max(told, SHORTEST_IDLE_S)


def _api_key(options: GlobalOptions, vllm: VllmOptions | None) -> str | None:
    """Return a key for our own probe; another engine than vLLM may go by the same variable."""
    keys = vllm.api_keys if vllm is not None else (options.environ.get("VLLM_API_KEY", ""),)
    return next((key for key in keys if key), None)
