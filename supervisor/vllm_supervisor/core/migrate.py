"""From a unit that runs vLLM to the same under vllm-supervisor@PORT.service: what to write, what to run, the way back.

Rules:
* Nothing is changed here or by whoever calls this: the result is a text for a person to read and run.
* Each setting of the old unit is carried over, replaced by the shipped unit's own with the reason, or said to need a
  hand. Nothing is dropped in silence.
* A shell wrapper is taken apart only where it is plain: `cd`, `export`, `source …/activate`, and vLLM at its end.
* Secrets are not printed: who copies them knows where they stand.

Sources: systemd.service(5) on command lines, systemd.exec(5) on Environment= and EnvironmentFile=, systemd.syntax(7).
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_supervisor.core.errors import UserError
from vllm_supervisor.core.redact import is_secret_name
from vllm_supervisor.core.vllm_args import DEFAULT_MODEL, read
from vllm_supervisor.core.vllm_words import without

COMMAND = "/opt/vllm-supervisor/bin/vllm-supervisor"
IMAGE = re.compile(r"vllm[-/]openai|\bvllm\b")
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+~-]+")
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OURS = "the shipped unit has its own, which fits the supervisor"

# What the shipped unit has its own of; the old value would break what it promises.
_REPLACED = {
    "Type": "Type=notify: systemd learns when the model answers",
    "Restart": "the supervisor restarts the engine; systemd restarts only a supervisor that failed",
    "RestartSec": _OURS,
    "RestartPreventExitStatus": _OURS,
    "RestartForceExitStatus": _OURS,
    "SuccessExitStatus": "the supervisor ends with 0 after a clean stop",
    "StartLimitIntervalSec": _OURS,
    "StartLimitInterval": _OURS,
    "StartLimitBurst": _OURS,
    "KillMode": "KillMode=mixed: TERM must reach the supervisor alone",
    "KillSignal": "SIGTERM begins the drain",
    "SendSIGKILL": _OURS,
    "FinalKillSignal": _OURS,
    "TimeoutStartSec": "a load may take as long as it makes progress; the limit is engine.start_timeout",
    "TimeoutStopSec": "the drain's own budget (drain.budget) counts, and TimeoutStopSec fits it",
    "TimeoutSec": "as TimeoutStartSec and TimeoutStopSec",
    "RuntimeMaxSec": "it would cut running requests; plan a restart by `vllm-supervisor restart`",
    "ExecStop": "the shipped unit stops by TERM, which begins the drain; a second signal would cut it short",
    "ExecStopPost": "the supervisor proves that nothing of the engine is left",
    "ExecReload": "reload reads the certificates again",
    "WatchdogSec": _OURS,
    "NotifyAccess": _OURS,
    "PIDFile": "there is none",
    "RemainAfterExit": _OURS,
    "GuessMainPID": _OURS,
    "OOMPolicy": _OURS,
    "OOMScoreAdjust": _OURS,
    "Delegate": _OURS,
    "DynamicUser": _OURS,
    "StateDirectory": _OURS,
    "RuntimeDirectory": _OURS,
    "CacheDirectory": _OURS,
    "StandardOutput": "the journal has both, the supervisor's lines with their priority",
    "StandardError": "the journal has both, the supervisor's lines with their priority",
    "SyslogIdentifier": _OURS,
    "Description": _OURS,
    "Documentation": _OURS,
    "WantedBy": _OURS,
    "Alias": "the new unit's name is vllm-supervisor@PORT",
    "DefaultInstance": _OURS,
}
# What is handled by itself, below.
_HANDLED = {"ExecStart", "ExecStartPre", "ExecStartPost", "Environment", "EnvironmentFile", "User", "Group"}
_KILLS = re.compile(r"\b(?:pkill|killall|kill|fuser)\b")
_SLEEPS = re.compile(r"(?:^|/)sleep\s")


@dataclass(frozen=True, slots=True)
class OldUnit:
    """What was read: the unit's `name`, its texts (file, then drop-ins), its environment files' variables by path.

    `homes` are the home directories of users by name, `rivals` other things that act on it (a sentence each, with the
    unit to switch off, or ""), `installed` whether the supervisor is where the shipped unit looks for it.
    """

    name: str
    texts: tuple[str, ...]
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    homes: Mapping[str, str] = field(default_factory=dict)
    rivals: tuple[tuple[str, str], ...] = ()
    enabled: bool = True


@dataclass(slots=True)
class Migration:
    """The result; empty `serve` and a `problem` where it cannot be translated. `notes` say why, `hands` what a person must do."""

    instance: str = "8000"
    serve: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    drop_in: list[str] = field(default_factory=list)
    unit_section: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hands: list[str] = field(default_factory=list)
    problem: str = ""
    activated: str = ""  # the bin directory of an environment that a shell activates first
    container: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0: run it; 1: something needs a hand first; 2: it cannot be translated."""
        return 2 if self.problem else 1 if self.hands else 0


def settings(texts: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Read unit files in their order: for each key its (section, value)s; an empty value takes back the earlier ones."""
    found: dict[str, list[tuple[str, str]]] = {}
    for text in texts:
        section = ""
        joined = re.sub(r"\\\n(?:\s*[#;].*\n)*", " ", text)
        for line in map(str.strip, joined.splitlines()):
            if line.startswith("[") and line.endswith("]"):
                section = line[1:-1]
            elif line and line[0] not in "#;" and "=" in line:
                key, _, value = (part.strip() for part in line.partition("="))
                if not value:
                    found[key] = []
                else:
                    found.setdefault(key, []).append((section, value))
    return found


def migrate(old: OldUnit) -> Migration:
    """Translate one unit."""
    found = settings(old.texts)
    made = Migration()
    environ = _environment(old, found, made)
    starts = [value for _, value in found.get("ExecStart", [])]
    if not starts:
        made.problem = f"{old.name} has no ExecStart=: it runs nothing"
        return made
    if len(starts) > 1:
        made.hands.append(f"it has {len(starts)} ExecStart= lines; only the last is translated")
    words = _words(starts[-1], environ, made)
    words = _unwrapped(words, environ, made)
    if _is_container(words):
        _container(words, made)
        return made
    engine, arguments = _engine(words)
    if arguments is None:
        made.problem = (
            f"{old.name} runs {shlex.join(words)[:200]!r}, in which no `vllm serve` is seen; translate it by hand"
        )
        return made
    _serve(engine, arguments, environ, made)
    _user(old, found, made)
    for key in ("ExecStartPre", "ExecStartPost"):
        for _, value in found.get(key, []):
            _helper(key, value, made)
    for key, values in found.items():
        if key in _REPLACED:
            made.notes.append(f"{key}={values[-1][1] if values else ''} is left out: {_REPLACED[key]}")
        elif key not in _HANDLED:
            for section, value in values:
                if section == "Unit":
                    made.unit_section.append(f"{key}={value}")
                elif section == "Service":
                    made.drop_in.append(f"{key}={value}")
                else:
                    made.notes.append(f"[{section}] {key}={value} is left out: {_OURS}")
    return made


# -- the command line ------------------------------------------------------------------------------------------------


def _environment(old: OldUnit, found: Mapping[str, list[tuple[str, str]]], made: Migration) -> dict[str, str]:
    """Return the unit's variables as far as they are known, and carry them over."""
    environ: dict[str, str] = {}
    for _, value in found.get("Environment", []):
        for word in _split(value, made):
            assignment = _ASSIGNMENT.fullmatch(word)
            if assignment is not None:
                environ[assignment[1]] = assignment[2]
                _keep(assignment[1], assignment[2], made)
    for _, value in found.get("EnvironmentFile", []):
        made.drop_in.append(f"EnvironmentFile={value}")
        environ |= old.files.get(value.removeprefix("-"), {})
    return environ


def _keep(name: str, value: str, made: Migration) -> None:
    if name == "HOME":
        made.drop_in.append(f"Environment=HOME={value}")
        return
    made.environment[name] = value
    if is_secret_name(name) and value:
        made.environment[name] = ""
        made.hands.append(
            f"copy the value of {name} from the old unit into the environment file; it is not printed here"
        )
    elif "%" in value:
        made.hands.append(
            f"{name}={value} holds a specifier (%…), which an environment file does not know; write it out"
        )


def _split(value: str, made: Migration) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:
        made.hands.append(f"its quotes do not match: {value[:100]}")
        return value.split()


def _words(line: str, environ: Mapping[str, str], made: Migration) -> list[str]:
    """Split a command line; a whole word `$NAME` becomes several, `${NAME}` stays one (systemd.service(5))."""
    words: list[str] = []
    for word in _split(line.lstrip("-@:+!|"), made):
        whole = re.fullmatch(r"\$(\w+)", word)
        if whole is not None and whole[1] in environ:
            words += _split(environ[whole[1]], made)
        else:
            words.append(_filled(word, environ, made))
    return words


def _filled(word: str, environ: Mapping[str, str], made: Migration) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in environ:
            made.hands.append(f"${name} is not known from the unit; write its value in the environment file")
        return environ.get(name, match[0])

    if re.search(r"%(?!%)", word.replace("%%", "")):
        made.hands.append(f"{word} holds a specifier of systemd's (%…); write out what it stands for")
    return _VARIABLE.sub(value, word.replace("%%", "%").replace("$$", "\0")).replace("\0", "$")


_SHELLS = ("sh", "bash", "dash", "zsh")
_HARD = re.compile(r"[|`]|\$\(|\b(?:while|for|until|if|case)\b|<<|&(?!&)")
_LOG = re.compile(r"\s*(?:[12&]?>>?\s*(?:&\d|[^\s;&|]+)|2>&1)")


def _unwrapped(words: list[str], environ: dict[str, str], made: Migration) -> list[str]:
    """Take off what only calls something else: env, nohup, exec, a shell with a plain script."""
    while words:
        name = words[0].rpartition("/")[2]
        if name == "env":
            words = words[1:]
            while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
                environ[assignment[1]] = assignment[2]
                _keep(assignment[1], assignment[2], made)
                words = words[1:]
        elif name in {"nohup", "exec", "setsid", "stdbuf", "unbuffer"}:
            words = [word for word in words[1:] if not (name == "stdbuf" and word.startswith("-"))]
            if name != "exec":
                made.notes.append(f"{name} is left out: the supervisor is the engine's parent")
        elif name in _SHELLS and any(re.fullmatch(r"-\w*c", word) for word in words[1:3]):
            at = next(index for index, word in enumerate(words) if re.fullmatch(r"-\w*c", word))
            script = words[at + 1] if at + 1 < len(words) else ""
            if "l" in words[at] or "i" in words[at]:
                made.hands.append(
                    f"{words[at]} reads the user's profile; what it sets belongs into the environment file"
                )
            words = _script(script, environ, made)
        elif name in {"numactl", "taskset", "nice", "ionice", "chrt", "sudo", "conda", "micromamba", "uv", "poetry"}:
            made.hands.append(
                f'`{name}` stands before vLLM; set engine.command to a script of yours that ends in: exec {name} … vllm "$@"'
            )
            start = next((index for index, word in enumerate(words) if word.rpartition("/")[2] == "vllm"), None)
            if start is None:
                return words
            words = words[start:]
        else:
            return words
    return words


def _script(script: str, environ: dict[str, str], made: Migration) -> list[str]:
    without_log = _LOG.sub("", script)
    if without_log != script:
        made.notes.append("its redirection of the output is left out: the journal has it")
    if _HARD.search(without_log.replace("&&", "")):
        made.hands.append(f"its shell script does more than start vLLM; see what of it is still needed: {script[:200]}")
    last: list[str] = []
    for part in re.split(r"&&|;|\n", without_log):
        words = [_filled(word, environ, made) for word in _split(part, made)]
        assigned: dict[str, str] = {}
        while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
            assigned[assignment[1]] = assignment[2]
            words = words[1:]
        if words[:1] == ["export"]:
            assigned |= dict(word.partition("=")[::2] for word in words[1:] if "=" in word)
            words = []
        for name, value in assigned.items():
            environ[name] = value
            _keep(name, value, made)
        if words[:1] in (["source"], ["."]) and len(words) > 1:
            made.activated = words[1].rpartition("/")[0]
        elif words[:1] == ["cd"] and len(words) > 1:
            made.drop_in.append(f"WorkingDirectory={words[1]}")
        elif words[:1] in (["set"], ["ulimit"], ["sleep"], ["umask"]):
            made.notes.append(
                f"`{' '.join(words)}` is left out: the shipped unit sets its own limits, and waits by itself"
            )
        elif words:
            last = words
    return last


def _engine(words: Sequence[str]) -> tuple[str, list[str] | None]:
    """Return vLLM's command and what follows `serve`; None where there is no vLLM in it."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "vllm" and words[index + 1 : index + 2] == ["serve"]:
            return word, list(words[index + 2 :])
        if word.startswith("vllm.entrypoints.") and words[index - 1 : index] == ["-m"]:
            python = words[index - 2] if index > 1 else "python3"
            rest = list(words[index + 1 :])
            beside, slash, _ = python.rpartition("/")
            return f"{beside}{slash}vllm", rest[1:] if rest[:1] == ["serve"] else rest
    return "", None


def _serve(engine: str, arguments: list[str], environ: Mapping[str, str], made: Migration) -> None:
    if "/" not in engine and made.activated:
        engine = f"{made.activated}/{engine}"
    if "/" in engine:
        made.environment["VLLM_SUPERVISOR_ENGINE__COMMAND"] = engine
    else:
        made.hands.append("where `vllm` is cannot be seen; set VLLM_SUPERVISOR_ENGINE__COMMAND=/path/to/bin/vllm")
    try:
        options = read([word for word in arguments if word != "--config"], environ)
        made.instance = str(options.port)
        given = without(arguments, [])[1]
        key = "--api-key" in given and options.api_keys
        named = ["--port", "--model", *(["--api-key"] if key else [])]
        rest, _ = without(arguments, named, model="--model" not in given)
    except UserError as error:
        made.problem = f"its command line is wrong for vLLM itself: {error}"
        return
    if key:
        made.environment["VLLM_API_KEY"] = ""
        made.hands.append(
            "copy the key of --api-key into the environment file as VLLM_API_KEY; on a command line everybody sees it"
        )
    made.serve = [*([] if options.model == DEFAULT_MODEL else [options.model]), *rest]
    if any(not _PLAIN.fullmatch(word) for word in made.serve):
        line = " ".join(_quoted(word) for word in made.serve)
        made.drop_in += ["ExecStart=", f"ExecStart={COMMAND} --name %i serve {line} --port %i"]


def _quoted(word: str) -> str:
    """Write a word for a unit's command line (systemd.syntax(7), and % and $ doubled)."""
    doubled = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return doubled
    escaped = doubled.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# -- what stands around it -------------------------------------------------------------------------------------------


def _user(old: OldUnit, found: Mapping[str, list[tuple[str, str]]], made: Migration) -> None:
    """Keep the user, its home and its weights: who downloaded them once need not do so again."""
    user = found.get("User", [("", "root")])[-1][1]
    home = old.homes.get(user, "")
    made.drop_in += ["DynamicUser=no", f"User={user}"]
    made.drop_in += [f"Group={value}" for _, value in found.get("Group", [])[-1:]]
    if "%" in user:
        made.hands.append(f"User={user} holds a specifier; write the name out")
    if not any(line.startswith("Environment=HOME=") for line in made.drop_in):
        if home:
            made.drop_in.append(f"Environment=HOME={home}")
        else:
            made.hands.append(f"the home of user {user} is not known here; add Environment=HOME= to the drop-in")
    cache = made.environment.get("HF_HOME") or (f"{home}/.cache" if home else "")
    if cache:  # the Hub's client writes locks beside the weights, and the shipped unit writes nowhere else
        made.drop_in.append(f"ReadWritePaths=-{cache}")
    if user == "root":
        made.notes.append("it ran as root, and so does the new one; a user of its own would be better (User=)")


def _helper(key: str, value: str, made: Migration) -> None:
    if _KILLS.search(value):
        made.notes.append(f"{key}={value} is left out: the supervisor removes what an engine left, and by pid alone")
    elif _SLEEPS.search(value):
        made.notes.append(f"{key}={value} is left out: the supervisor waits for memory and address by itself")
    else:
        made.drop_in.append(f"{key}={value}")


# -- containers ------------------------------------------------------------------------------------------------------

# Options of `docker run` and `podman run` that have no value.
_FLAGS = {
    "--rm",
    "-d",
    "--detach",
    "-i",
    "-t",
    "-it",
    "-ti",
    "--interactive",
    "--tty",
    "--init",
    "--privileged",
    "--read-only",
    "--replace",
}


def _is_container(words: Sequence[str]) -> bool:
    return bool(words) and words[0].rpartition("/")[2] in {"docker", "podman", "nerdctl"}


def _container(words: Sequence[str], made: Migration) -> None:
    """Show the container's new command: this unit cannot be the shipped one."""
    made.problem = "it runs a container, whose image has to hold the supervisor: docs/containers.md builds one"
    if "run" not in words:
        made.problem += f"; what `{shlex.join(words)[:80]}` starts is not in this unit"
        return
    at = words.index("run") + 1
    kept: list[str] = []
    while at < len(words) and words[at].startswith("-"):
        takes = "=" not in words[at] and words[at] not in _FLAGS and at + 1 < len(words)
        option = list(words[at : at + (2 if takes else 1)])
        at += len(option)
        name = option[0].partition("=")[0]
        if name in {"--restart", "--stop-timeout", "--health-cmd", "--entrypoint", "--init"}:
            made.notes.append(f"{' '.join(option)} is left out: {_OURS.replace('unit', 'image')}")
        elif name in {"-e", "--env"} and is_secret_name(option[-1].removeprefix(f"{name}=").partition("=")[0]):
            kept += ["--env", option[-1].removeprefix(f"{name}=").partition("=")[0]]
            made.hands.append(f"{kept[-1]} is taken from the caller's environment; its value is not printed here")
        else:
            kept += option
    image, arguments = (words[at], list(words[at + 1 :])) if at < len(words) else ("", [])
    _, served = _engine(arguments)
    arguments = served if served is not None else arguments
    made.container = [
        *words[: words.index("run") + 1],
        "--stop-timeout",
        "120",
        *kept,
        "YOUR-IMAGE-WITH-SUPERVISOR",
        *arguments,
    ]
    made.notes.append(
        f"the new image is built from {image}: docker build --build-arg … -f configs/container/Containerfile ."
    )


# -- for people ------------------------------------------------------------------------------------------------------


def render(old: OldUnit, made: Migration) -> str:
    """Write it as a shell script with comments, to be read first: `sh` runs it."""
    lines = [
        f"# {old.name} under vllm-supervisor. Read it, then run it as root from the clone of vllm-supervisor: sh FILE"
    ]
    if made.problem:
        lines.append(f"# Cannot be translated: {made.problem}")
    lines += [f"# BY HAND: {sentence}" for sentence in dict.fromkeys(made.hands)]
    lines += [f"# note: {sentence}" for sentence in dict.fromkeys(made.notes)]
    if made.container:
        lines += ["# the new command:", "#   " + shlex.join(made.container)]
    if made.problem:
        return "\n".join(lines) + "\n"
    unit = f"vllm-supervisor@{made.instance}.service"
    env, drop = f"/etc/vllm-supervisor/{made.instance}.env", f"/etc/systemd/system/{unit}.d"
    variables = {"SERVE": " ".join(made.serve), **made.environment}
    if any(line.startswith("ExecStart=") for line in made.drop_in):
        del variables["SERVE"]
    lines += [
        "set -e",
        "",
        "# 1. The supervisor, in an environment of its own, and its unit.",
        f"test -x {COMMAND} || {{ python3 -m venv /opt/vllm-supervisor && /opt/vllm-supervisor/bin/pip install .; }}",
        "install -m 644 configs/systemd/vllm-supervisor@.service /etc/systemd/system/",
        "",
        "# 2. What it serves, and with which variables.",
        "install -d -m 755 /etc/vllm-supervisor",
        *_file(env, [f"{name}={_value(value)}" for name, value in variables.items()], "640"),
        "",
        "# 3. What differs from the shipped unit.",
        f"install -d -m 755 {drop}",
        *_file(
            f"{drop}/migrated.conf",
            [*(["[Unit]", *made.unit_section, ""] if made.unit_section else []), "[Service]", *made.drop_in],
            "644",
        ),
        "systemctl daemon-reload",
        "",
    ]
    if old.rivals:
        lines.append("# 4. Whatever else restarts it: a second authority cuts requests (docs/watchdogs.md).")
        for sentence, rival in old.rivals:
            lines.append(f"#    {sentence}")
            lines += (
                [f"systemctl disable --now {rival}"]
                if rival
                else ["#    do it yourself: take it out, or let it report instead"]
            )
        lines.append("")
    if made.hands:
        lines += ["exit 1  # take this line out when the lines BY HAND above are done", ""]
    lines += [
        "# 5. The change. Requests are refused from here until the model is loaded.",
        f"systemctl disable --now {old.name}",
        f"systemctl enable --now {unit}        # returns when the model answers",
        f"{COMMAND} --name {made.instance} doctor || true",
        "",
        "# The way back:",
        f"#   systemctl disable --now {unit} && systemctl {'enable --now' if old.enabled else 'start'} {old.name}",
        *(f"#   systemctl enable --now {rival}" for _, rival in old.rivals if rival),
    ]
    return "\n".join(lines) + "\n"


def _file(path: str, lines: Sequence[str], mode: str) -> list[str]:
    return [f"cat >{path} <<'END'", *lines, "END", f"chmod {mode} {path}"]


def _value(value: str) -> str:
    """Write a value for an environment file (systemd.exec(5)): quoted where blanks or quotes are in it."""
    if (
        not value
        or _PLAIN.fullmatch(value)
        or (re.fullmatch(r"[A-Za-z0-9_./:=,@+~ -]+", value) and value == value.strip())
    ):
        return value
    escaped = re.sub(r'([\\"`$])', r"\\\1", value)
    return f'"{escaped}"'
