"""From the three sources to one configuration: file, environment, `--set`; the later one wins.

Rules:
* Everything that is wrong is told at once: one `ConfigError` with a line for each mistake, naming key, value, source
  and the mend. A value of a key that looks like a secret is never repeated.
* `VLLM_SUPERVISOR_SECTION__KEY` names a key; a name without `__` that is no top-level key is ignored, because
  Kubernetes injects `VLLM_SUPERVISOR_PORT=tcp://…` for a Service of that name. One that is a key but for the second
  underscore is ignored too, and named as probably meant.
* Entries of a table are merged key by key: `--set engine.env.NAME=value`, `VLLM_SUPERVISOR_ENGINE__ENV__NAME=value`.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_supervisor.core.config_kinds import TABLE, Setting
from vllm_supervisor.core.config_pairs import contradictions
from vllm_supervisor.core.config_sections import Config
from vllm_supervisor.core.errors import ConfigError
from vllm_supervisor.core.redact import is_secret_name
from vllm_supervisor.core.units import BadValueError

PREFIX = "VLLM_SUPERVISOR_"
DEFAULT = "default"
MOST_PROBLEMS = 50  # told at once
LONGEST_NAME = 100  # characters of a name that is shown, and compared with others


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and, for each key, where its value came from (`default`, a file, a variable, `--set`).

    `doubts`: sentences about what was ignored and probably meant.
    """

    config: Config
    origins: Mapping[str, str]
    doubts: tuple[str, ...] = ()


def settings() -> dict[str, Setting]:
    """Return every key (`section.key`) with what is known of it, in the order they are declared."""
    found: dict[str, Setting] = {}
    for item in dataclasses.fields(Config):
        if "setting" in item.metadata:
            found[item.name] = item.metadata["setting"]
            continue
        assert isinstance(item.default_factory, type)  # noqa: S101  # a field is a key or a section, by construction
        for inner in dataclasses.fields(item.default_factory):
            found[f"{item.name}.{inner.name}"] = inner.metadata["setting"]
    return found


def value_of(config: Config, key: str) -> Any:
    """Return the value of `key` (`section.key`, as `settings` names it)."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def build(
    file: Mapping[str, Any] | None,
    env: Mapping[str, str],
    sets: Sequence[str],
    *,
    file_name: str = "configuration file",
) -> Loaded:
    """Merge the sources and parse every value once.

    `file` is the parsed TOML, `env` the whole environment, `sets` the texts of `--set`. Raises ConfigError with every
    mistake found.
    """
    known = settings()
    problems: list[str] = []
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, DEFAULT)
    sources = (*_from_file(file or {}, known, file_name), *_from_env(env), *_from_sets(sets, problems))
    for key, raw, origin in sources:
        if len(problems) >= MOST_PROBLEMS:
            problems.append("and perhaps more: mend these first")
            break
        table, _, entry = key.rpartition(".")
        if table in known and known[table].kind is TABLE:
            key, raw = table, {entry: raw}  # noqa: PLW2901  # an entry of a table is a table of one, merged below
        if key not in known:
            problems.append(f"{origin}: {_unknown(key, raw, known)}")
            continue
        try:
            value = known[key].kind.parse(raw)
        except BadValueError as error:
            problems.append(f"{origin}: {key} = {_shown(key, raw)}: {error}")
            continue
        values[key] = {**values.get(key, {}), **value} if known[key].kind is TABLE else value
        origins[key] = origin
    if problems:
        raise ConfigError(problems)
    config = _assemble(values)
    told = [
        f"{origin}: {_written(config, known, pair.first)} and {_written(config, known, pair.second)}: {pair.remedy}"
        for pair, origin in contradictions(config, origins, DEFAULT)
    ]
    if told:
        raise ConfigError(told)
    return Loaded(config, origins, tuple(_doubts(env, known)))


def _written(config: Config, known: Mapping[str, Setting], key: str) -> str:
    return f"{key} = {known[key].kind.show(value_of(config, key))}"


def _from_file(file: Mapping[str, Any], known: Mapping[str, Setting], name: str) -> Iterator[tuple[str, Any, str]]:
    sections = {key.partition(".")[0] for key in known if "." in key}
    for key, value in file.items():
        if key in sections and isinstance(value, dict):
            for inner, entry in value.items():
                yield f"{key}.{inner}", entry, name
        else:
            yield key, value, name


def _from_env(env: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    top = {item.name for item in dataclasses.fields(Config) if "setting" in item.metadata}
    for name in sorted(env):
        rest = name.removeprefix(PREFIX)
        if rest == name or ("__" not in rest and rest.lower() not in top):
            continue
        section, _, key = rest.partition("__")
        key, _, entry = key.partition("__")
        parts = [section.lower(), key.lower(), entry]  # the name of a table's entry keeps its case
        yield ".".join(part for part in parts if part), env[name], f"environment {name}"


def _doubts(env: Mapping[str, str], known: Mapping[str, Setting]) -> Iterator[str]:
    """Name the variables that lack the second underscore between section and key."""
    for name in sorted(env):
        rest = name.removeprefix(PREFIX)
        if rest == name or "__" in rest:
            continue
        for key, setting in known.items():
            short = key.replace(".", "_").upper()
            entry = rest[len(short) + 1 :] if setting.kind is TABLE else ""
            if "." in key and (rest.upper() == short or (entry and rest.upper().startswith(f"{short}_"))):
                meant = "__".join(part for part in (*key.upper().split("."), entry) if part)
                yield f"environment {name} is ignored: it names no key; {PREFIX}{meant} was probably meant (two underscores)"


def _from_sets(sets: Sequence[str], problems: list[str]) -> Iterator[tuple[str, Any, str]]:
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            problems.append(f"--set {key[:LONGEST_NAME]}: expected section.key=value")
            continue
        yield key.strip(), value, "--set"


def _unknown(key: str, raw: object, known: Mapping[str, Setting]) -> str:
    """Say what `key` is not, and what was probably meant: a key, or a section of the file."""
    sections = {name.partition(".")[0]: None for name in known if "." in name}
    if key in sections:
        return f"{key} is a section, not a key; write {key}.KEY, or [{key}] above its keys"
    if isinstance(raw, dict) and "." not in key:
        near = difflib.get_close_matches(key[:LONGEST_NAME], sections, n=1, cutoff=0.6)
        meant = f"did you mean [{near[0]}]?" if near else f"there are {', '.join(f'[{name}]' for name in sections)}"
        return f"unknown section [{key[:LONGEST_NAME]}]; {meant}"
    return f"unknown key {key[:LONGEST_NAME]}{_nearest(key, known)}"


def _nearest(key: str, known: Mapping[str, Setting]) -> str:
    """Suggest what was probably meant: a near spelling, or the same key in another section."""
    near = difflib.get_close_matches(key[:LONGEST_NAME], known, n=1, cutoff=0.75)
    near = near or [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    return f"; did you mean {near[0]}?" if near else "; `vllm-supervisor config schema` lists them all"


def _shown(key: str, raw: object) -> str:
    if isinstance(raw, dict) or is_secret_name(key):
        return "…"
    try:
        text = repr(raw)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list nested as deeply
        return "…"
    return text if len(text) <= 60 else text[:59] + "…"


def _assemble(values: Mapping[str, Any]) -> Config:
    own: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, dot, name = key.partition(".")
        if dot:
            sections.setdefault(section, {})[name] = value
        else:
            own[key] = value
    defaults = Config()
    changed = {name: dataclasses.replace(getattr(defaults, name), **inner) for name, inner in sections.items()}
    return dataclasses.replace(defaults, **own, **changed)
