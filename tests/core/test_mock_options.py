"""The stand-in engine's command line: vLLM's spellings are obeyed, everything else of vLLM's is tolerated."""

from pathlib import Path

import pytest

from vllm_supervisor.mock.options import OptionError, parse


def test_vllms_spellings_land_on_the_same_values() -> None:
    """Underscores, equals signs and words give the same, and the last one wins."""
    options = parse(["serve", "m", "--max_num_seqs=3", "--port", "1", "--port=2", "--uds", "/a", "--uds="], {})
    assert (options.model, options.max_num_seqs, options.port, options.uds) == ("m", 3, 2, "")


def test_unknown_options_pass_with_and_without_values() -> None:
    """Options of vLLM that do not matter are skipped with their value, wherever the model stands."""
    options = parse(
        [
            "serve",
            "m",
            "--load-format",
            "dummy",
            "--enforce-eager",
            "-O3",
            "--compilation-config.level=3",
            "--dtype=auto",
        ],
        {},
    )
    assert options.model == "m"
    assert parse(["serve", "--enforce-eager", "m"], {}).model == "m"
    assert parse(["serve", "--model", "m"], {}).model == "m"


def test_lists_take_every_word_up_to_the_next_option() -> None:
    """Several served names and several keys are read; the first name is the model's public one."""
    options = parse(["serve", "m", "--served-model-name", "a", "b", "--api-key", "k", "l", "--port", "9"], {})
    assert (options.names, options.api_keys, options.port) == (("a", "b"), ("k", "l"), 9)


def test_the_environment_gives_key_and_modes() -> None:
    """VLLM_API_KEY counts only without --api-key; dev mode and the response store are vLLM's own variables."""
    environ = {"VLLM_API_KEY": "env", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    options = parse(["serve", "m"], environ)
    assert (options.api_keys, options.dev_mode, options.store) == (("env",), True, True)
    assert parse(["serve", "m", "--api-key", "x"], environ).api_keys == ("x",)


def test_the_yaml_file_stands_before_the_command_line(tmp_path: Path) -> None:
    """Values of vLLM's --config are values values that the command line overrides."""
    path = tmp_path / "c.yaml"
    path.write_text("model: from-file\nport: 1\nmax-num-seqs: 5\nserved-model-name: [x, y]\nenforce-eager: true\n")
    options = parse(["serve", "--config", str(path), "--port", "2"], {})
    assert (options.model, options.port, options.max_num_seqs, options.names) == ("from-file", 2, 5, ("x", "y"))


def test_serve_listens_everywhere_and_the_bare_form_on_loopback() -> None:
    """As vLLM, `serve` has no host of its own; the tool's form stays on this machine, where faults may be set."""
    assert (parse(["serve", "m"], {}).host, parse(["serve", "m"], {}).local) == ("", False)
    assert parse(["--port", "9"], {}).local
    assert parse(["serve", "m", "--uds", "/x"], {}).local


@pytest.mark.parametrize("runner", [["--runner", "pooling"], ["--task=embed"]])
def test_a_pooling_model_is_asked_for_in_both_ways(runner: list[str]) -> None:
    """Either option makes a pooling model."""
    assert parse(["serve", "m", *runner], {}).pooling


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "x"],
        ["--port"],
        ["--mock-nothing"],
        ["--mock-fault", "no_such_fault"],
        ["--mock-fault", "exit=900"],
        ["--mock-tokens-per-second", "0"],
        ["--config", "/nowhere.yaml"],
    ],
)
def test_what_cannot_be_obeyed_is_an_error(words: list[str]) -> None:
    """Bad values, unknown options of ours and unknown faults are refused in one line."""
    with pytest.raises(OptionError) as error:
        parse(["serve", "m", *words], {})
    assert "\n" not in str(error.value)
