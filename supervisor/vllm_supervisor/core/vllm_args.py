"""What a `vllm serve` command line says about address, TLS, keys and mode; everything else in it stays unread.

Rules (vLLM 0.32):
* `--config x.yaml` as two words stands for the file's entries, which come before the command line's options and so
  lose against them; written with `=`, vLLM ignores it (vllm/utils/argparse_utils.py).
* An empty value, or the word None, takes an optional text back (`optional_type`, vllm/engine/arg_utils.py).
* `--api-key` hides `VLLM_API_KEY`; empty keys guard nothing (vllm/entrypoints/serve/middleware/register.py).
* What would make our own listener differ from what vLLM would open is refused: UsageError, status 2, as vLLM exits.
* So are our own options behind `serve`, with the stand-in too, which takes every option: ours would have no effect.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_supervisor.core.cors import Cors
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.vllm_words import Words, from_yaml, take_apart

OURS = ("--set", "--name", "--engine")  # options that stand before `serve`, and that vLLM has none of; --config it has
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"

_READ = frozenset(
    {
        "--allow-credentials",
        "--allowed-headers",
        "--allowed-methods",
        "--allowed-origins",
        "--api-key",
        "--api-server-count",
        "--data-parallel-multi-port-external-lb",
        "--data-parallel-size",
        "--disable-log-stats",
        "--enable-ssl-refresh",
        "--grpc",
        "--grpc-port",
        "--headless",
        "--hf-config-path",
        "--host",
        "--model",
        "--port",
        "--root-path",
        "--served-model-name",
        "--shutdown-timeout",
        "--ssl-ca-certs",
        "--ssl-cert-reqs",
        "--ssl-certfile",
        "--ssl-ciphers",
        "--ssl-keyfile",
        "--uds",
    }
)


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What we read of vLLM's options, with vLLM's own defaults. Times are seconds."""

    model: str = DEFAULT_MODEL
    served_model_name: tuple[str, ...] = ()
    host: str | None = None
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # as in the standard library: 0 none, 1 optional, 2 required
    ssl_ciphers: str | None = None
    enable_ssl_refresh: bool = False
    root_path: str | None = None
    cors: Cors | None = None  # None: pages of other origins may read nothing
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    shutdown_timeout: int = 0
    api_server_count: int | None = None  # None: vLLM decides, by its data parallel mode
    data_parallel_size: int = 1
    multi_port: bool = False
    disable_log_stats: bool = False
    headless: bool = False
    grpc: bool = False
    grpc_port: int | None = None
    hf_config_path: str | None = None

    @property
    def has_no_front(self) -> bool:
        """Whether this is a node without an HTTP server, which follows another one that has it.

        Source: vllm/entrypoints/cli/serve.py (`ServeSubcommand.cmd`), where fewer than one API server means headless.
        """
        return self.headless or (self.api_server_count is not None and self.api_server_count < 1)

    @property
    def label(self) -> str:
        """The name clients use for the model."""
        return self.served_model_name[0] if self.served_model_name else self.model


def config_file(arguments: Sequence[str]) -> str | None:
    """Return the YAML file that `--config FILE` names, or None; UsageError where vLLM would refuse it."""
    for word, after in itertools.pairwise([*arguments, ""]):
        path = after if word == "--config" else word.removeprefix("--config=")
        if path != word and path.endswith(".toml"):
            raise UsageError(
                f"--config {path} after `serve` is vLLM's option, for its own YAML file; the supervisor's stands before "
                f"it: vllm-supervisor --config {path} serve …"
            )
    if "--config" not in arguments:
        return None
    if arguments.count("--config") > 1:
        raise UsageError("--config is given twice, and vLLM reads one file: merge them")
    index = list(arguments).index("--config")
    if index + 1 == len(arguments):
        raise UsageError("--config names no file; write --config FILE.yaml")
    path = arguments[index + 1]
    if path.rpartition(".")[2] not in {"yaml", "yml"}:
        raise UsageError(f"--config {path}: vLLM reads only .yaml and .yml files; rename it")
    return path


def read(
    arguments: Sequence[str], environ: Mapping[str, str], file_values: Mapping[str, Any] | None = None
) -> VllmOptions:
    """Read the arguments that follow `vllm serve`; `file_values` are the entries of the file `config_file` names.

    Raises UsageError for a mistake in one of the options we read, and for options of ours.
    """
    _refuse_ours(arguments)
    words = take_apart(_with_file(arguments, file_values), _READ)
    given = words.given
    variable = environ.get("VLLM_API_KEY")
    return VllmOptions(
        model=words.model or _text(words, "--model") or DEFAULT_MODEL,
        served_model_name=_texts(words, "--served-model-name"),
        host=_text(words, "--host"),
        port=_port(words),
        uds=_text(words, "--uds"),
        ssl_keyfile=_text(words, "--ssl-keyfile"),
        ssl_certfile=_text(words, "--ssl-certfile"),
        ssl_ca_certs=_text(words, "--ssl-ca-certs"),
        ssl_cert_reqs=_number(words, "--ssl-cert-reqs") or 0,
        ssl_ciphers=_text(words, "--ssl-ciphers"),
        enable_ssl_refresh="--enable-ssl-refresh" in given,
        root_path=_text(words, "--root-path"),
        cors=_cors(words),
        # A given key, even an empty one, hides the variable's.
        api_keys=_texts(words, "--api-key") if "--api-key" in given else (variable,) if variable else (),
        shutdown_timeout=_number(words, "--shutdown-timeout") or 0,
        api_server_count=_number(words, "--api-server-count"),
        data_parallel_size=_number(words, "--data-parallel-size") or 1,
        multi_port="--data-parallel-multi-port-external-lb" in given,
        disable_log_stats="--disable-log-stats" in given,
        headless="--headless" in given,
        grpc="--grpc" in given,
        grpc_port=_number(words, "--grpc-port"),
        hf_config_path=_text(words, "--hf-config-path"),
    )


def refusal(options: VllmOptions) -> str | None:
    """Say why these options cannot stand behind one front door and what to do instead, or return None.

    A headless node is no such case: it has no front door at all (`VllmOptions.has_no_front`).
    """
    if options.grpc:
        return "--grpc serves gRPC instead of HTTP, which the front door cannot carry; run it with plain `vllm serve`"
    if options.grpc_port is not None:
        return (
            "--grpc-port opens a second way to the engine, past the front door; leave it out or run plain `vllm serve`"
        )
    if options.multi_port:
        return (
            "--data-parallel-multi-port-external-lb opens one port a rank, and there is one front door; "
            "run one `vllm-supervisor serve … --data-parallel-rank N --port P` for each rank instead"
        )
    return None


def _refuse_ours(arguments: Sequence[str]) -> None:
    for word in itertools.takewhile(lambda word: word != "--", arguments):
        name = word.partition("=")[0]
        if name in OURS:
            raise UsageError(
                f"{name} after `serve` is for vLLM, which has no such option; the supervisor's stands before it: "
                f"vllm-supervisor {name} … serve …"
            )


def _with_file(arguments: Sequence[str], values: Mapping[str, Any] | None) -> list[str]:
    """Put the file's entries where vLLM puts them: after a model that stands first, before everything else."""
    words = list(arguments)
    if values is None:
        return words
    index = words.index("--config")
    del words[index : index + 2]
    first = 1 if words and index > 0 and not words[0].startswith("-") else 0
    return [*words[:first], *from_yaml(values), *words[first:]]


def _texts(words: Words, name: str) -> tuple[str, ...]:
    return tuple(value for value in words.given.get(name, ()) if value not in {"", "None"})


def _text(words: Words, name: str) -> str | None:
    return next(iter(_texts(words, name)), None)


def _cors(words: Words) -> Cors | None:
    origins = _json_texts(words, "--allowed-origins", ())
    if not origins:
        return None
    return Cors(
        origins,
        _json_texts(words, "--allowed-methods", ("*",)),
        _json_texts(words, "--allowed-headers", ("*",)),
        credentials="--allow-credentials" in words.given,
    )


def _json_texts(words: Words, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    if name not in words.given:
        return default
    try:
        texts = json.loads(words.given[name][0])
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise UsageError(f"""{name}: expected a JSON list of strings, as in {name} '["https://chat.example.org"]'""")
    return tuple(texts)


def _number(words: Words, name: str) -> int | None:
    if name not in words.given:
        return None
    text = words.given[name][0]
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} {text!r}: expected a whole number") from None


def _port(words: Words) -> int:
    port = _number(words, "--port")
    if port is None:
        return 8000
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: expected a number from 0 to 65535")
    return port
