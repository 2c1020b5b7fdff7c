"""The command line of the stand-in engine: `vllm serve`'s arguments, read as far as they matter, the rest tolerated.

Rules (vLLM 0.32, `vllm/utils/argparse_utils.py`): `_` counts as `-`, `--name=value` as `--name value`, the last one
wins, an empty `--uds=` means none. Options this file does not know are skipped together with a bare word after them.
Our own options begin with `--mock-`; a typo in those is an error, since a fault that is not set proves nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_supervisor.mock.faults import TABLE, FaultError, FaultSet, parse_count, parse_seconds


class OptionError(Exception):
    """A command line that cannot be obeyed; one line, exit status 2 as argparse has it."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line and the environment ask for. Durations in seconds; names and defaults are vLLM's."""

    model: str = "mock-model"
    served: tuple[str, ...] = ()
    host: str = ""
    port: int = 8000
    uds: str = ""
    headless: bool = False
    max_num_seqs: int = 256
    max_model_len: int = 4096
    max_num_batched_tokens: int = 2048
    engines: int = 1
    api_servers: int = 1
    api_keys: tuple[str, ...] = ()
    root_path: str = ""
    shutdown_timeout: float = 0.0
    pooling: bool = False
    log_stats: bool = True
    access_log: bool = True
    dev_mode: bool = False
    store: bool = False
    help: bool = False
    tokens_per_second: float = 40.0
    start_time: float = 0.3
    answer_tokens: int = 64
    death_time: float = 4.0
    faults: tuple[tuple[str, str | None], ...] = field(default=())

    @property
    def names(self) -> tuple[str, ...]:
        """The names the model is served under; the first is the one answers and metrics carry."""
        return self.served or (self.model,)

    @property
    def local(self) -> bool:
        """Whether only this machine can connect, which is where faults may be set while running."""
        return bool(self.uds) or self.host in {"127.0.0.1", "localhost", "::1"}


HELP = """\
usage: python -m vllm_supervisor.mock serve [MODEL] [any `vllm serve` option] [--mock-… options]
       vllm-supervisor mock-engine [--port N | --uds PATH] [--mock-… options]

A stand-in for vLLM: same HTTP, same processes, same ends, no GPU. Of vLLM's options it obeys --host, --port, --uds,
--served-model-name, --max-num-seqs, --max-model-len, --max-num-batched-tokens, --data-parallel-size,
--api-server-count, --api-key, --root-path, --shutdown-timeout, --runner pooling, --task embed, --disable-log-stats,
--disable-uvicorn-access-log, --headless, --config; it takes every other one without a word.

  --mock-tokens-per-second N   tokens a second of each request (default 40)
  --mock-start-time SECONDS    how long the load takes (default 0.3s)
  --mock-answer-tokens N       length of an answer that is not told to go on (default 64)
  --mock-death-time SECONDS    from EngineCore's death to the main process's exit 0 (default 4s)
  --mock-fault NAME[=VALUE]    show a fault from the start; may be repeated

Faults: """


def help_text() -> str:
    """One screen: usage, our options, and the names of the faults."""
    lines, line = [], HELP.splitlines()[-1]
    for name in TABLE:
        if len(line) + len(name) > 116:
            lines.append(line.rstrip())
            line = "  "
        line += name + ", "
    lines.append(line.rstrip(", "))
    return HELP[: HELP.rindex("Faults:")] + "\n".join(lines) + "\nEach is explained in docs/mock-engine.md.\n"


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise ValueError(text)
    return value


def _model_len(text: str) -> int:
    units = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
    return int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(text)


# Options with one value: name -> (field, reader). A reader raises ValueError for a bad value.
_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "model": ("model", str),
    "host": ("host", str),
    "port": ("port", int),
    "uds": ("uds", str),
    "max-num-seqs": ("max_num_seqs", int),
    "max-model-len": ("max_model_len", _model_len),
    "max-num-batched-tokens": ("max_num_batched_tokens", int),
    "data-parallel-size": ("engines", int),
    "dp": ("engines", int),
    "api-server-count": ("api_servers", int),
    "asc": ("api_servers", int),
    "root-path": ("root_path", str),
    "shutdown-timeout": ("shutdown_timeout", float),
    "runner": ("pooling", lambda text: text == "pooling"),
    "task": ("pooling", lambda text: text in {"embed", "embedding", "classify", "score", "reward", "pooling"}),
    "mock-tokens-per-second": ("tokens_per_second", _positive),
    "mock-start-time": ("start_time", parse_seconds),
    "mock-answer-tokens": ("answer_tokens", parse_count),
    "mock-death-time": ("death_time", parse_seconds),
}
_LISTS = {"served-model-name": "served", "api-key": "api_keys"}
_FLAGS: dict[str, tuple[str, bool]] = {
    "disable-log-stats": ("log_stats", False),
    "disable-uvicorn-access-log": ("access_log", False),
    "headless": ("headless", True),
    "help": ("help", True),
}


def _yaml_words(path: str) -> list[str]:
    """VLLM's own `--config FILE`: its keys as options, before those of the command line."""
    import yaml  # noqa: PLC0415 - only who uses such a file pays for it

    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - a plain read of a path the user named
            content = yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise OptionError(f"--config {path}: {error}".replace("\n", " ")) from None
    words: list[str] = []
    for key, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, bool):
            words += [f"--{key}"] if value else []
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        else:
            words.append(f"--{key}={value}")
    return words


def parse(argv: list[str], environ: Mapping[str, str]) -> Options:
    """Read a command line; raise OptionError with one line for what cannot be obeyed."""
    words = list(argv)
    found: dict[str, Any] = {}
    served = words[:1] == ["serve"]
    if served:
        del words[0]
    else:
        found["host"] = "127.0.0.1"
    if "--config" in words[:-1]:
        at = words.index("--config")
        path = words[at + 1]
        del words[at : at + 2]
        # The model stands first on the command line and before the options of the file.
        head = 1 if words[:1] and not words[0].startswith("-") else 0
        words[head:head] = _yaml_words(path)
    faults: list[tuple[str, str | None]] = []
    skipped: str | None = None
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word in {"-", "--"}:
            found.setdefault("model", word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = {"h": "help"}.get(name, name.replace("_", "-"))
        bare = bool(words) and not words[0].startswith("-")
        if name in _LISTS:
            values = [value] if equals else []
            while not equals and words and not words[0].startswith("-"):
                values.append(words.pop(0))
            found[_LISTS[name]] = tuple(values)
        elif name in _FLAGS:
            key, setting = _FLAGS[name]
            found[key] = setting
        elif name in _VALUES or name == "mock-fault":
            if not equals:
                if not words:
                    raise OptionError(f"argument --{name}: expected one argument")
                value = words.pop(0)
            if name == "mock-fault":
                fault, with_value, text = value.partition("=")
                faults.append((fault, text if with_value else None))
                continue
            key, read = _VALUES[name]
            try:
                found[key] = read(value)
            except (ValueError, KeyError):
                raise OptionError(f"argument --{name}: invalid value: {value!r}") from None
        elif name.startswith("mock-"):
            raise OptionError(f"unrecognized arguments: --{name}")
        elif not equals and bare:
            skipped = words.pop(0)
    if skipped is not None and served:
        found.setdefault("model", skipped)
    if not found.get("api_keys") and environ.get("VLLM_API_KEY"):
        found["api_keys"] = (environ["VLLM_API_KEY"],)
    options = replace(
        Options(),
        dev_mode=environ.get("VLLM_SERVER_DEV_MODE") == "1",
        store=environ.get("VLLM_ENABLE_RESPONSES_API_STORE") == "1",
        faults=tuple(faults),
        **found,
    )
    try:
        fault_set(options)
    except FaultError as error:
        raise OptionError(f"argument --mock-fault: {error}") from None
    return options


def fault_set(options: Options) -> FaultSet:
    """Give the faults asked for at start; raise FaultError for one that does not exist or fit."""
    faults = FaultSet()
    for name, value in options.faults:
        faults.set(name, value)
    return faults
