"""Reading vLLM's options as vLLM reads them."""

import pytest
import yaml

from fakes.vllm_recorded import ACCEPTED, YAML
from vllm_supervisor.core.errors import UsageError
from vllm_supervisor.core.vllm_args import VllmOptions, config_file, read, refusal

ENTRIES = yaml.safe_load(YAML)


def parse(line: str, environ: dict[str, str] | None = None) -> VllmOptions:
    """Read a command line; `@FILE` stands for a file with the recorded entries."""
    words = line.replace("@FILE", "/etc/x.yaml").split()
    return read(words, environ or {}, ENTRIES if config_file(words) else None)


@pytest.mark.parametrize(("line", "expected"), ACCEPTED, ids=[line for line, _ in ACCEPTED])
def test_as_vllm_reads_it(line: str, expected: dict[str, object]) -> None:
    """Each command line means what vLLM's own parser, asked once and recorded, made of it."""
    defaults = VllmOptions(model="m")
    found = parse(line)
    assert {name: getattr(found, name) for name in VllmOptions.__dataclass_fields__} == {
        name: expected.get(name, getattr(defaults, name)) for name in VllmOptions.__dataclass_fields__
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("m --port", "--port needs a value"),
        ("m --host --port 9", "--host needs a value"),
        ("m --port x", "--port 'x': expected a whole number"),
        ("m --port 65536", "--port 65536: expected a number from 0 to 65535"),
        ("m --api x", "--api could mean --api-key or --api-server-count; write it out"),
        ("m --headless=true", "--headless=true: --headless takes no value"),
        ("m --config", "--config names no file; write --config FILE.yaml"),
        ("m --config a.yaml --config b.yaml", "--config is given twice, and vLLM reads one file: merge them"),
        ("m --config a.json", "--config a.json: vLLM reads only .yaml and .yml files; rename it"),
        (
            "m --config a.toml",
            (
                "--config a.toml after `serve` is vLLM's option, for its own YAML file; the supervisor's stands before it: "
                "vllm-supervisor --config a.toml serve …"
            ),
        ),
        (
            "m --config=a.toml --port 9",
            (
                "--config a.toml after `serve` is vLLM's option, for its own YAML file; the supervisor's stands before it: "
                "vllm-supervisor --config a.toml serve …"
            ),
        ),
        (
            "m --set drain.budget=1s",
            (
                "--set after `serve` is for vLLM, which has no such option; the supervisor's stands before it: "
                "vllm-supervisor --set … serve …"
            ),
        ),
        (
            "--name=x m",
            (
                "--name after `serve` is for vLLM, which has no such option; the supervisor's stands before it: "
                "vllm-supervisor --name … serve …"
            ),
        ),
        ("m --port= --api-key k", "--port '': expected a whole number"),
    ],
)
def test_undecidable_lines(line: str, message: str) -> None:
    """What vLLM itself refuses, in an option that names our listener, is refused in one sentence."""
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("line", "port", "model"),
    [
        ("m --device cpu --port 9", 9, "m"),  # of older versions; in 0.32 the beginning of two other options
        ("m --swap-space 4 --port 9", 9, "m"),
        ("m --brand-new --port 9", 9, "m"),
        ("--brand-new value --port 9", 9, "Qwen/Qwen3-0.6B"),
        ("m --brand-new=--port --port 9", 9, "m"),
        ("--port 9 m", 9, "m"),  # Python 3.12 and newer
        ("m --chat-template", 8000, "m"),
        ("--hf-overrides.x y m --port 9", 9, "m"),
        ("-O 3 m --port 9", 9, "m"),
        ("-- m", 8000, "m"),
        ("m -- --port 9", 8000, "m"),
        ("", 8000, "Qwen/Qwen3-0.6B"),
    ],
)
def test_options_of_other_versions(line: str, port: int, model: str) -> None:
    """What we do not know, or what is no concern of ours, is left for vLLM to judge."""
    found = parse(line)
    assert (found.port, found.model) == (port, model)


@pytest.mark.parametrize(
    ("line", "environ", "keys"),
    [
        ("m", {}, ()),
        ("m", {"VLLM_API_KEY": "e"}, ("e",)),
        ("m --api-key a b", {"VLLM_API_KEY": "e"}, ("a", "b")),
        ("m --api-key=", {"VLLM_API_KEY": "e"}, ()),
        ("m", {"VLLM_API_KEY": ""}, ()),
        ("m --api-key -1 - a", {}, ("-1", "-", "a")),
    ],
)
def test_keys(line: str, environ: dict[str, str], keys: tuple[str, ...]) -> None:
    """A given key hides the variable's, even an empty one, which guards nothing."""
    assert parse(line, environ).api_keys == keys


def test_a_model_behind_the_file_follows_its_entries() -> None:
    """Only a model that stands first stays before the file's entries; vLLM takes a later one for a value of the last."""
    words = ["--config", "x.yaml", "m"]
    assert read(words, {}, {"model": "x", "served-model-name": ["a"]}).served_model_name == ("a", "m")


def test_keys_do_not_show() -> None:
    """A printed set of options does not hold the keys."""
    assert "hunter2" not in repr(parse("m --api-key hunter2"))


def test_the_label_is_the_first_served_name() -> None:
    """Clients know the model by its first served name, else by its own."""
    assert parse("m --served-model-name a b").label == "a"
    assert parse("m").label == "m"


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        ("m --grpc", "--grpc serves gRPC"),
        ("m --grpc-port 5", "--grpc-port opens a second way"),
        ("m -dpm -dp 2 -dpl 2", "--data-parallel-multi-port-external-lb opens one port a rank"),
    ],
)
def test_refused_modes(line: str, begins: str) -> None:
    """A mode without one HTTP front is refused with a sentence that says what to do."""
    sentence = refusal(parse(line))
    assert sentence is not None
    assert sentence.startswith(begins)
    assert "run" in sentence.partition(";")[2] or "`vllm serve`" in sentence


@pytest.mark.parametrize(
    "line", ["m", "m -asc 2", "m -dp 4", "m -dp 4 --data-parallel-rank 1", "m --data-parallel-hybrid-lb -dpl 2"]
)
def test_modes_with_one_front(line: str) -> None:
    """Every mode with one HTTP address is accepted."""
    assert refusal(parse(line)) is None
