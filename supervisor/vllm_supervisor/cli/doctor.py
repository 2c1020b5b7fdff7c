"""`doctor`: a pre-flight of this machine, this configuration and its rivals. It looks, and changes nothing."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from vllm_supervisor.adapters import (
    cgroup,
    clock,
    directories,
    executable,
    leftovers,
    lock,
    machine_facts,
    nvidia,
    old_unit,
    outer_limit,
    ports,
    processes,
    rival_sources,
    systemd_units,
    vllm_install,
    vllm_yaml,
)
from vllm_supervisor.adapters import neighbours as proc_neighbours
from vllm_supervisor.cli import doctor_memory
from vllm_supervisor.cli.finding import connect
from vllm_supervisor.cli.planning import GlobalOptions, load_config
from vllm_supervisor.core import (
    doctor_engine,
    doctor_machine,
    doctor_orphans,
    doctor_rivals,
    doctor_units,
    migrate,
    neighbours,
    vllm_args,
)
from vllm_supervisor.core.address import Address, TcpAddress, UnixAddress
from vllm_supervisor.core.config import Loaded
from vllm_supervisor.core.config_sections import Config
from vllm_supervisor.core.doctor import Finding, Level, as_json, exit_status, ok, render
from vllm_supervisor.core.doctor_engine import Installation
from vllm_supervisor.core.doctor_machine import Machine
from vllm_supervisor.core.doctor_units import UnitFacts
from vllm_supervisor.core.errors import ConfigError, SetupError, UserError
from vllm_supervisor.core.neighbours import Server
from vllm_supervisor.core.plan import default_name
from vllm_supervisor.core.vllm_args import VllmOptions


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--json", "as_json_", is_flag=True, help="One JSON object instead of text.")
@click.option("--migrate", "unit", metavar="UNIT", help="Show how to run what this unit (a name or a file) runs.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[serve [MODEL] [any `vllm serve` option]...]")
@click.pass_obj
def doctor(options: GlobalOptions, *, as_json_: bool, unit: str | None, command: tuple[str, ...]) -> int:
    """Check machine, configuration, units and rival watchdogs before they matter; status 0, 1 (warnings), 2 (errors).

    With a `serve` command line its options and its port are checked as well. Root sees more.

    --migrate prints a shell script for what a unit runs today, under vllm-supervisor: environment file, drop-in, commands
    and the way back; status 1 where something needs a hand first, 2 where it cannot be translated.
    """
    if unit is not None:
        return _migrate(unit, as_json_=as_json_)
    if command and command[0] != "serve":
        raise click.UsageError(f"doctor {command[0]}: expected nothing, or the command line after `serve`")
    as_json_ = as_json_ or "--json" in command  # vLLM has no such option, and people write it last
    findings = examine(options, [word for word in command[1:] if word != "--json"])
    click.echo(json.dumps(as_json(findings)) if as_json_ else render(findings))
    return exit_status(findings)


def _migrate(unit: str, *, as_json_: bool) -> int:
    old = old_unit.read(unit, outer_limit.ask)
    made = migrate.migrate(old)
    old = replace(old, rivals=tuple(_rivals_of(old.name, int(made.instance))), enabled=_enabled(old.name))
    shown = {"status": made.status, "unit": old.name, "rivals": old.rivals, **asdict(made)}
    click.echo(json.dumps(shown) if as_json_ else migrate.render(old, made), nl=as_json_)
    return made.status


def _rivals_of(name: str, port: int) -> list[tuple[str, str]]:
    """Return what else acts on this server, but its own unit: a sentence, and the unit to switch off, or ""."""
    sources = [one for one in rival_sources.gather().texts if doctor_rivals.unit_of(one) != name]
    suspects = doctor_rivals.suspects(sources, [port])
    off = systemd_units.switched_off(outer_limit.ask, suspects, user=False)
    found: dict[str, str] = {}
    for source in sources:
        for finding in doctor_rivals.rivals([source], [port], off):
            if finding.level is Level.WARNING:
                found[finding.what] = doctor_rivals.unit_of(source)
    timers = systemd_units.triggers(outer_limit.ask, list(found.values()))
    return [(what, " ".join(timers.get(one, [one])) if one else "") for what, one in found.items()]


def _enabled(name: str) -> bool:
    return systemd_units.property_of(outer_limit.ask, name, "UnitFileState") == "enabled"


def examine(options: GlobalOptions, arguments: Sequence[str]) -> list[Finding]:
    """Gather and judge everything."""
    try:
        loaded = load_config(options)
    except ConfigError as error:
        mend = "vllm-supervisor config check"
        return [Finding(Level.ERROR, "config", problem, "nothing starts with it", mend) for problem in error.problems]
    config = loaded.config
    findings = _doubts(loaded)
    vllm = VllmOptions()
    try:
        vllm = _options(arguments, options.environ)
    except UserError as error:
        findings.append(Finding(Level.ERROR, "options", str(error), "the engine would not start", "correct it"))
    units, silent = _units(options.name)
    findings += silent
    for facts in units:
        findings += _unit(facts)
    ours = [facts for facts in units if facts.ours]
    if arguments or not ours:
        findings += doctor_engine.options("this command line", vllm, {**options.environ, **config.engine.env})
        findings += _installation(options.engine, config, options.environ)
        findings += doctor_memory.findings(config.memory, arguments, options.environ)
    instances = _instances(options, arguments, vllm, ours)
    findings += _rivals([where.port for where in instances.values() if isinstance(where, TcpAddress)])
    findings += _orphans(config)
    findings += doctor_rivals.bare_servers(_bare_servers(Path(config.memory.proc), options.environ))
    return findings + doctor_machine.machine(_machine(options, config, instances, unit=bool(ours)))


def _instances(
    options: GlobalOptions, arguments: Sequence[str], vllm: VllmOptions, ours: Sequence[UnitFacts]
) -> dict[str, Address]:
    """Return the address of each instance that is meant: of a command line, of --name, of the units, else the default."""
    if arguments:
        return {options.name or default_name(_address(vllm)): _address(vllm)}
    units = {}
    for facts in ours:
        where = _unit_address(facts)
        units[next(iter(facts.own_options().get("--name", ())), default_name(where))] = where
    if options.name is None:
        return units or {default_name(_address(vllm)): _address(vllm)}
    if options.name in units:
        return {options.name: units[options.name]}
    port = options.name.isdecimal() and int(options.name) <= 65535
    return {options.name: TcpAddress("", int(options.name))} if port else {}


def _doubts(loaded: Loaded) -> list[Finding]:
    why = "it looks as if it were in force, and is not"
    return [Finding(Level.WARNING, "config", doubt, why, "rename or unset it") for doubt in loaded.doubts]


def _options(arguments: Sequence[str], environ: Mapping[str, str]) -> VllmOptions:
    path = vllm_args.config_file(arguments)
    options = vllm_args.read(arguments, environ, None if path is None else vllm_yaml.read(Path(path)))
    if sentence := vllm_args.refusal(options):
        raise SetupError(sentence)
    return options


def _units(name: str | None) -> tuple[list[UnitFacts], list[Finding]]:
    shipped = [] if name is None else [f"vllm-supervisor@{name}.service"]
    found = systemd_units.services(outer_limit.ask, user=False, also=shipped)
    mine = (
        systemd_units.services(outer_limit.ask, user=True) if os.geteuid() and "XDG_RUNTIME_DIR" in os.environ else []
    )
    units = [*(found or []), *(mine or [])]
    if found is None:
        what = "systemd does not answer here, so no unit was checked"
        return units, [
            Finding(Level.NOTE, "unit", what, "as it should be in a container", "elsewhere: run this as root")
        ]
    return units, [] if units else [ok("unit", "no unit runs vLLM or a supervisor")]


def _unit(facts: UnitFacts) -> list[Finding]:
    """Judge a unit by the configuration it runs with: its own options and its own environment."""
    if facts.bare:
        return [doctor_units.bare(facts)]
    given = facts.own_options()
    config_file = next(iter(given.get("--config", ())), None)
    engine = next(iter(given.get("--engine", ())), "vllm")
    try:
        config = load_config(
            GlobalOptions(config_file, tuple(given.get("--set", ())), None, engine, facts.environ)
        ).config
        vllm = _options(facts.serve_arguments() or [], facts.environ)
    except UserError as error:
        return [Finding(Level.ERROR, "unit", f"{facts.name}: {error}", "it would not start", "correct it")]
    drain = config.drain
    needed = drain.propagation + drain.budget + config.engine.stop_grace + drain.documentation + drain.reserve
    return [
        *doctor_units.unit(facts, needed, doctor_machine.files_wanted(config.front_door.max_connections)),
        *doctor_engine.options(facts.name, vllm, {**facts.environ, **config.engine.env}),
        *(_installation(engine, config, facts.environ) if facts.serve_arguments() is not None else ()),
        *doctor_memory.findings(config.memory, facts.serve_arguments() or [], facts.environ),
    ]


def _unit_address(facts: UnitFacts) -> Address:
    try:
        return _address(_options(facts.serve_arguments() or [], facts.environ))
    except UserError:
        return _address(VllmOptions())


def _installation(engine: str, config: Config, environ: Mapping[str, str]) -> list[Finding]:
    if engine == "mock":
        return [ok("vllm", "the stand-in engine needs no vLLM")]
    try:
        found = executable.find(config.engine.command, search_path=environ.get("PATH"), mend="set engine.command")
    except SetupError as problem:
        return doctor_engine.installation(Installation("", "", str(problem), ""))
    clobbered = vllm_install.clobbered_supervisor(found)
    return doctor_engine.installation(Installation(str(found), vllm_install.version(found), "", clobbered))


def _orphans(config: Config) -> list[Finding]:
    survey = processes.Abandoned("", "", config.engine.sweep_domain, locked=lock.holding_run).survey()
    return doctor_orphans.orphans(
        [f"{member.name} (pid {member.id.pid})" for member in survey.abandoned],
        [(f"{member.name} (pid {member.id.pid})", fate.value) for member, fate in survey.untold],
        sweeps=config.engine.sweep,
    )


def _bare_servers(proc: Path, environ: Mapping[str, str]) -> Sequence[Server]:
    on_gpu = nvidia.process_memory(environ.get("PATH", ""), proc)
    return neighbours.bare_servers(proc_neighbours.look(proc), os.getpid(), on_gpu)


def _rivals(served: Sequence[int]) -> list[Finding]:
    sources = rival_sources.gather()
    suspects = doctor_rivals.suspects(sources.texts, served)
    off = systemd_units.switched_off(outer_limit.ask, suspects, user=False)
    findings = doctor_rivals.rivals(sources.texts, served, off) + doctor_rivals.containers(sources.containers, served)
    if sources.hidden:
        what = f"{sources.hidden} cron files or units may not be read by this user"
        findings.append(Finding(Level.NOTE, "rival", what, "a rival may stand in them", "run this as root"))
    return findings


def _address(vllm: VllmOptions) -> Address:
    return UnixAddress(vllm.uds) if vllm.uds is not None else TcpAddress(vllm.host or "", vllm.port)


def _machine(options: GlobalOptions, config: Config, instances: Mapping[str, Address], *, unit: bool) -> Machine:
    shm, memory = machine_facts.shared_memory(), machine_facts.memory()
    segments = leftovers.named_like_segments()
    soft, hard = machine_facts.open_files()
    where = cgroup.own_path()
    delegated = "" if unit else cgroup.not_delegated(where)
    problems: list[tuple[str, str]] = []
    served: list[str] = []
    for name, address in instances.items():
        if isinstance(address, TcpAddress) and (said := _try_port(address)):
            if said.partition(" in use by ")[2].startswith(f"pid {_pid(replace(options, name=name))} "):
                # Its start has judged its directories, as the user it runs as, who need not be us.
                served.append(f"{address} is served by the supervisor {name!r}")
                continue
            problems.append(("port", said))
        problems += _places(replace(options, name=name), config)
    return Machine(
        shm_total=None if shm is None else shm[0],
        shm_free=None if shm is None else shm[1],
        shm_unused=segments.unused,
        shm_untold=segments.untold,
        files_soft=soft,
        files_hard=hard,
        memory_total=None if memory is None else memory.total,
        memory_available=None if memory is None else memory.available,
        gpus=machine_facts.gpus(),
        driver=machine_facts.driver(),
        year=int(clock.stamp()[:4]),
        clock_synchronised=machine_facts.clock_synchronised(),
        cgroup_version=1 if isinstance(where, cgroup.Unavailable) else 2,
        delegated=delegated,
        max_connections=config.front_door.max_connections,
        problems=tuple(dict.fromkeys(problems)),
        served=tuple(served),
        units=unit,
    )


def _try_port(address: TcpAddress) -> str:
    """Bind the port, as a start would, and let it go at once; return why that fails, or ""."""
    try:
        ports.listen(address).close()
    except SetupError as problem:
        return str(problem)
    return ""


def _pid(options: GlobalOptions) -> int | None:
    """Return the pid of the running instance of this name, or None where none answers this user."""
    try:
        return int(connect(options).get("/status")["pid"])
    except (UserError, KeyError, TypeError, ValueError):
        return None


def _places(options: GlobalOptions, config: Config) -> list[tuple[str, str]]:
    """Look at the directories without making them."""
    name = options.name or ""
    run_dir = directories.run_directory(config.run_dir, options.environ, name)
    state_dir = directories.state_directory(config.state_dir, options.environ, name)
    checks: tuple[tuple[str, Callable[[], None]], ...] = (
        ("run_dir", lambda: directories.check_length(run_dir)),
        ("run_dir", lambda: directories.check_writable(run_dir, "run_dir")),
        ("state_dir", lambda: directories.check_writable(state_dir, "state_dir")),
    )
    found = []
    for check, look in checks:
        try:
            look()
        except SetupError as problem:
            found.append((check, str(problem)))
    return found
