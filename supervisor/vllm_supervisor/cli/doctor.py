"""`doctor`: a pre-flight of this machine, this configuration and its rivals. It looks, and changes nothing."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
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
    outer_limit,
    ports,
    processes,
    rival_sources,
    systemd_units,
    vllm_install,
    vllm_yaml,
)
from vllm_supervisor.cli import doctor_memory
from vllm_supervisor.cli.planning import GlobalOptions, load_config
from vllm_supervisor.core import doctor_engine, doctor_machine, doctor_orphans, doctor_rivals, doctor_units, vllm_args
from vllm_supervisor.core.address import Address, TcpAddress, UnixAddress
from vllm_supervisor.core.config import Loaded
from vllm_supervisor.core.config_sections import Config
from vllm_supervisor.core.doctor import Finding, Level, as_json, exit_status, ok, render
from vllm_supervisor.core.doctor_engine import Installation
from vllm_supervisor.core.doctor_machine import Machine
from vllm_supervisor.core.doctor_units import UnitFacts
from vllm_supervisor.core.errors import ConfigError, SetupError, UserError
from vllm_supervisor.core.plan import default_name
from vllm_supervisor.core.vllm_args import VllmOptions


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--json", "as_json_", is_flag=True, help="One JSON object instead of text.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[serve [MODEL] [any `vllm serve` option]...]")
@click.pass_obj
def doctor(options: GlobalOptions, *, as_json_: bool, command: tuple[str, ...]) -> int:
    """Check machine, configuration, units and rival watchdogs before they matter; status 0, 1 (warnings), 2 (errors).

    With a `serve` command line its options and its port are checked as well. Root sees more.
    """
    if command and command[0] != "serve":
        raise click.UsageError(f"doctor {command[0]}: expected nothing, or the command line after `serve`")
    as_json_ = as_json_ or "--json" in command  # vLLM has no such option, and people write it last
    findings = examine(options, [word for word in command[1:] if word != "--json"])
    click.echo(json.dumps(as_json(findings)) if as_json_ else render(findings))
    return exit_status(findings)


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
    findings += _rivals([*([vllm.port] if arguments or not ours else []), *(_port(facts) for facts in ours)])
    findings += _orphans(config)
    return findings + doctor_machine.machine(_machine(options, config, _address(vllm), unit=bool(ours)))


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
        *doctor_units.unit(facts, needed),
        *doctor_engine.options(facts.name, vllm, {**facts.environ, **config.engine.env}),
        *(_installation(engine, config, facts.environ) if facts.serve_arguments() is not None else ()),
        *doctor_memory.findings(config.memory, facts.serve_arguments() or [], facts.environ),
    ]


def _port(facts: UnitFacts) -> int:
    try:
        return _options(facts.serve_arguments() or [], facts.environ).port
    except UserError:
        return VllmOptions().port


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
    def run_that_locks(state_dir: Path) -> str | None:
        return next((one.holder.run for one in lock.living([state_dir])), None)

    survey = processes.Abandoned("", "", config.engine.sweep_domain, locked=run_that_locks).survey()
    return doctor_orphans.orphans(
        [f"{member.name} (pid {member.id.pid})" for member in survey.abandoned],
        [(f"{member.name} (pid {member.id.pid})", fate.value) for member, fate in survey.untold],
        sweeps=config.engine.sweep,
    )


def _rivals(served: Sequence[int]) -> list[Finding]:
    sources = rival_sources.gather()
    findings = doctor_rivals.rivals(sources.texts, served) + doctor_rivals.containers(sources.containers, served)
    if sources.hidden:
        what = f"{sources.hidden} cron files or units may not be read by this user"
        findings.append(Finding(Level.NOTE, "rival", what, "a rival may stand in them", "run this as root"))
    return findings


def _address(vllm: VllmOptions) -> Address:
    return UnixAddress(vllm.uds) if vllm.uds is not None else TcpAddress(vllm.host or "", vllm.port)


def _machine(options: GlobalOptions, config: Config, address: Address, *, unit: bool) -> Machine:
    shm, memory = machine_facts.shared_memory(), machine_facts.memory()
    segments = leftovers.named_like_segments()
    soft, hard = machine_facts.open_files()
    where = cgroup.own_path()
    delegated = "" if unit else cgroup.not_delegated(where)
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
        problems=tuple(_problems(options, config, address)),
    )


def _problems(options: GlobalOptions, config: Config, address: Address) -> list[tuple[str, str]]:
    """Try the port, as a start would, and let it go at once; look at the directories without making them."""
    name = options.name or default_name(address)
    run_dir = directories.run_directory(config.run_dir, options.environ, name)
    state_dir = directories.state_directory(config.state_dir, options.environ, name)
    checks: tuple[tuple[str, Callable[[], None]], ...] = (
        ("port", lambda: ports.listen(address).close() if isinstance(address, TcpAddress) else None),
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
