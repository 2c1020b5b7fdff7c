"""One configuration out of file, environment and --set."""

import contextlib
import itertools
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_supervisor.core.config import build, settings, value_of
from vllm_supervisor.core.config_kinds import BOOL, SIZE, STR, TABLE, above_zero, choice, integer, list_of
from vllm_supervisor.core.config_sections import Config
from vllm_supervisor.core.errors import ConfigError
from vllm_supervisor.core.units import BadValueError

CONFIGS = Path(__file__).parents[2] / "configs"


def problems(file: dict | None = None, env: dict | None = None, sets: tuple[str, ...] = ()) -> list[str]:
    """Return what `build` complains about."""
    with pytest.raises(ConfigError) as caught:
        build(file, env or {}, sets, file_name="f.toml")
    return caught.value.problems


def test_nothing_given_is_the_defaults() -> None:
    """Without any source the defaults hold, and say so."""
    loaded = build(None, {}, ())
    assert loaded.config == Config()
    assert set(loaded.origins) == set(settings())
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.config.engine.start_timeout == 1800.0
    assert loaded.config.front_door.max_body == 2**30


def test_the_later_source_wins() -> None:
    """File, environment, --set: the later one wins, the last --set among them, and the origin is told."""
    file = {"drain": {"budget": "1s"}, "log": {"level": "error"}, "release": "a"}
    env = {"VLLM_SUPERVISOR_DRAIN__BUDGET": "2s", "VLLM_SUPERVISOR_RELEASE": "b"}
    loaded = build(file, env, ("drain.budget=3s", "drain.budget=4s"), file_name="f.toml")
    assert loaded.config.drain.budget == 4.0
    assert loaded.config.release == "b"
    assert loaded.origins["drain.budget"] == "--set"
    assert loaded.origins["release"] == "environment VLLM_SUPERVISOR_RELEASE"
    assert loaded.origins["log.level"] == "f.toml"


def test_every_mistake_is_told_at_once() -> None:
    """Unknown keys and bad values of all sources come in one error, each with source, key, value and mend."""
    told = problems(
        {"engine": {"comand": "x"}, "drain": {"budget": "soon"}, "nonsense": 1, "log": "loud"},
        {"VLLM_SUPERVISOR_LOG__FORMAT": "xml"},
        ("listen.port=70000", "engine.sweep"),
    )
    assert told == [
        "--set engine.sweep: expected section.key=value",
        "f.toml: unknown key engine.comand; did you mean engine.command?",
        'f.toml: drain.budget = \'soon\': expected a duration such as "200ms", "90s", "15m", "6h", "30d", or seconds',
        "f.toml: unknown key nonsense; `vllm-supervisor config schema` lists them all",
        "f.toml: log is a section, not a key; write log.KEY, or [log] above its keys",
        'environment VLLM_SUPERVISOR_LOG__FORMAT: log.format = \'xml\': expected one of "auto", "json", "console"',
        "--set: listen.port = '70000': expected a whole number from 0 to 65535",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [("drain.buget", "drain.budget"), ("listen.budget", "drain.budget"), ("frontdoor.hold", "front_door.hold")],
)
def test_the_nearest_key_is_suggested(key: str, meant: str) -> None:
    """A misspelled key, or one in the wrong section, names the key that was probably meant."""
    assert problems(sets=(f"{key}=1",))[0].endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("ledgr", "unknown section [ledgr]; did you mean [ledger]?"),
        ("frontdoor", "unknown section [frontdoor]; did you mean [front_door]?"),
        ("zzz", "unknown section [zzz]; there are [engine], "),
    ],
)
def test_the_nearest_section_is_suggested(section: str, told: str) -> None:
    """A misspelled section of a file is told once, whatever stands in it, with the one that was probably meant."""
    [said] = problems({section: {"sync": "always", "x": 1}})
    assert said.removeprefix("f.toml: ").startswith(told)


@pytest.mark.parametrize(
    "name", ["VLLM_SUPERVISOR_PORT", "VLLM_SUPERVISOR_PORT_8000_TCP_ADDR", "VLLM_SUPERVISORX__Y", "OTHER__KEY"]
)
def test_foreign_variables_are_ignored(name: str) -> None:
    """Variables that name no key of ours, such as Kubernetes injects, change nothing."""
    assert build(None, {name: "tcp://10.0.0.1:8000"}, ()).config == Config()


def test_an_unknown_variable_with_a_section_is_told() -> None:
    """A variable with a double underscore means a key of ours, so an unknown one is a mistake."""
    told = problems(env={"VLLM_SUPERVISOR_ENGINE__COMAND": "x"})
    assert told == [
        "environment VLLM_SUPERVISOR_ENGINE__COMAND: unknown key engine.comand; did you mean engine.command?"
    ]


@pytest.mark.parametrize("key", ["memory.speed", "engine.speed", "health.patience"])
def test_keys_without_a_feature_are_unknown(key: str) -> None:
    """A key that nothing acts on yet is refused, never silently accepted."""
    assert f"unknown key {key}" in problems(sets=(f"{key}=auto",))[0]


def test_table_entries_are_merged() -> None:
    """Entries of engine.env from all sources stand side by side; a later source replaces one of the same name."""
    loaded = build(
        {"engine": {"env": {"A": "file", "B": "file"}}},
        {"VLLM_SUPERVISOR_ENGINE__ENV__Mixed_Case": "env", "VLLM_SUPERVISOR_ENGINE__ENV__B": "env"},
        ("engine.env.C=x=y",),
    )
    assert loaded.config.engine.env == {"A": "file", "B": "env", "Mixed_Case": "env", "C": "x=y"}


def test_secrets_are_neither_told_nor_printed() -> None:
    """A bad table never shows its values, and a printed configuration shows no table."""
    told = problems({"engine": {"env": {"HF_TOKEN": "hunter2", "N": 5}}})
    assert "hunter2" not in told[0]
    assert "hunter2" not in repr(build({"engine": {"env": {"HF_TOKEN": "hunter2"}}}, {}, ()))


TEXTS = [
    (BOOL, "TRUE", True), (BOOL, "false", False), (integer(0, 9), " 7 ", 7), (list_of(STR), "a, b", ("a", "b")),
    (list_of(STR), '["a,b"]', ("a,b",)), (list_of(STR), "", ()), (list_of(STR), "[]", ()), (choice("x", "y"), "y", "y"),
]  # fmt: skip
BAD = [
    (BOOL, "yes"), (BOOL, 1), (BOOL, None), (integer(0, 9), "10"), (integer(0, 9), True), (integer(0, 9), "1.0"),
    (integer(0, 9), "9" * 5000), (list_of(STR), 5), (list_of(STR), [5]), (list_of(STR), "[1"), (list_of(choice("x")), "x,z"),
    (choice("x"), ["x"]), (above_zero(SIZE), "0"), (STR, 5), (STR, "a\nb"), (TABLE, "x"), (TABLE, {"a": 1}), (TABLE, {"a=": "b"}),
    (TABLE, {"": "b"}), (TABLE, {"a": "\0"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "value"), TEXTS)
def test_values_from_text(kind, text: str, value: object) -> None:
    """The text of a variable or a --set becomes the value beside it."""
    assert kind.parse(text) == value


@pytest.mark.parametrize(("kind", "value"), BAD)
def test_bad_values(kind, value: object) -> None:
    """A value that is not of its kind is refused with what was expected."""
    with pytest.raises(BadValueError, match=r"^expected "):
        kind.parse(value)


@given(st.text())
def test_any_set_is_taken_or_told(text: str) -> None:
    """Whatever --set holds, it is a value or a ConfigError, never another exception."""
    with contextlib.suppress(ConfigError):
        build(None, {}, (text,))


@given(st.sampled_from(sorted(settings())), st.text())
def test_any_value_of_any_key_is_taken_or_told(key: str, text: str) -> None:
    """Whatever is set for whichever key, it is parsed to something that can be written and read again, or told."""
    kind = settings()[key].kind
    try:
        value = value_of(build(None, {}, (f"{key}={text}",)).config, key)
    except ConfigError:
        return
    assert kind.parse(tomllib.loads(f"value = {kind.show(value)}")["value"]) == value


@pytest.mark.parametrize("key", sorted(settings()))
def test_every_default_can_be_written_and_read(key: str) -> None:
    """Each key's default, written as `config show` writes it, is TOML that reads back as the same value."""
    known = settings()[key]
    value = value_of(Config(), key)
    assert known.kind.parse(tomllib.loads(f"value = {known.kind.show(value)}")["value"]) == value
    assert known.doc


def flat(file: dict) -> dict[str, object]:
    """Return the file's entries by `section.key`."""
    sections = {key.split(".")[0] for key in settings() if "." in key}
    return {
        f"{key}.{inner}" if key in sections else key: entry
        for key, value in file.items()
        for inner, entry in (value.items() if key in sections else [("", value)])
    }


def test_the_example_holds_every_key_and_default() -> None:
    """configs/example.toml names exactly the keys that work, in their order, with the defaults of the code."""
    written = flat(tomllib.loads((CONFIGS / "example.toml").read_text()))
    assert list(written) == list(settings())
    assert {key: known.default for key, known in settings().items()} == written


def test_the_example_explains_every_key() -> None:
    """Each block of keys in configs/example.toml stands under a comment."""
    lines = (CONFIGS / "example.toml").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if "=" in line and not line.startswith("#"):
            assert before.startswith("#") or "=" in before, line


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configurations_are_right(path: Path) -> None:
    """Every configuration we ship is accepted whole."""
    build(tomllib.loads(path.read_text()), {}, ())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VLLM_SUPERVISOR_DRAIN_BUDGET", "VLLM_SUPERVISOR_DRAIN__BUDGET"),
        ("VLLM_SUPERVISOR_drain_budget", "VLLM_SUPERVISOR_DRAIN__BUDGET"),
        ("VLLM_SUPERVISOR_FRONT_DOOR_MAX_BODY", "VLLM_SUPERVISOR_FRONT_DOOR__MAX_BODY"),
        ("VLLM_SUPERVISOR_LISTEN_PORT", "VLLM_SUPERVISOR_LISTEN__PORT"),
        ("VLLM_SUPERVISOR_ENGINE_ENV_HF_Token", "VLLM_SUPERVISOR_ENGINE__ENV__HF_Token"),
        ("VLLM_SUPERVISOR_DRAIN__BUDGET", ""),
        ("VLLM_SUPERVISOR_RELEASE", ""),
        ("VLLM_SUPERVISOR_PORT", ""),  # these three Kubernetes sets
        ("VLLM_SUPERVISOR_SERVICE_HOST", ""),
        ("VLLM_SUPERVISOR_PORT_8000_TCP_ADDR", ""),
        ("VLLM_SUPERVISOR_ENGINE_ENV", "VLLM_SUPERVISOR_ENGINE__ENV"),
        ("DRAIN_BUDGET", ""),
    ],
)
def test_a_variable_without_its_second_underscore_is_named(name: str, meant: str) -> None:
    """It is ignored as before, and the name that would have worked is told; other variables are nobody's business."""
    loaded = build(None, {name: "{}" if name.endswith("ENV") else "5s"}, ())
    assert len(loaded.doubts) == bool(meant)
    if meant:
        assert loaded.config == Config()
        assert (
            loaded.doubts[0]
            == f"environment {name} is ignored: it names no key; {meant} was probably meant (two underscores)"
        )
