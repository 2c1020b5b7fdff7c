"""`serve` and `run`: from the command line to the plan that is carried out."""

import sys
import types
from pathlib import Path

import pytest

from vllm_supervisor.cli.main import main
from vllm_supervisor.core.address import TcpAddress, UnixAddress
from vllm_supervisor.core.engine_command import EngineKind, Transport
from vllm_supervisor.core.plan import Plan, TlsFiles

SOCKET = UnixAddress("/e.sock")


class Place:
    """A directory with a `vllm`, a model, and the plans that were carried out."""

    def __init__(self, root: Path) -> None:
        """Lay it out below `root`."""
        self.root = root
        self.plans: list[Plan] = []
        self.vllm = root / "bin" / "vllm"
        self.vllm.parent.mkdir()
        self.vllm.write_text("#!/bin/sh\n")
        self.vllm.chmod(0o755)
        (root / "model").mkdir()
        (root / "model" / "config.json").touch()

    def run(self, *words: str) -> int:
        """Run the command line with directories of its own."""
        return main(["--set", f"run_dir={self.root}/r", "--set", f"state_dir={self.root}/s", *words])

    def plan(self, *words: str) -> Plan:
        """Run the command line and return the plan that was carried out."""
        assert self.run(*words) == 0
        return self.plans.pop()


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Give a place where carrying out a plan only keeps it."""
    made = Place(tmp_path_factory.mktemp("p"))
    app = types.ModuleType("vllm_supervisor.runtime.app")
    app.run = lambda plan: made.plans.append(plan) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, app.__name__, app)
    monkeypatch.setenv("PATH", str(made.vllm.parent))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return made


def test_serve(place: Place) -> None:
    """`serve` takes vLLM from PATH, listens where vLLM would, and gives vLLM a private socket."""
    plan = place.plan("serve", f"{place.root}/model", "--served-model-name", "tiny", "--foo", "-x", "--", "y")
    assert (plan.kind, plan.name, plan.model, plan.path_first) == (
        EngineKind.VLLM,
        "8000",
        "tiny",
        str(place.vllm.parent),
    )
    assert plan.listeners == (TcpAddress("", 8000),)
    assert (plan.tls, plan.root_paths, plan.api_key) == (None, (), None)
    assert plan.command.argv(SOCKET) == [
        str(place.vllm), "serve", f"{place.root}/model", "--served-model-name", "tiny", "--foo", "-x",
        "--port", "0", "--uds", "/e.sock", "--", "y",
    ]  # fmt: skip
    assert plan.run_dir == place.root / "r"
    assert (place.root / "s").is_dir()


def test_serve_takes_over_what_names_the_front_door(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Socket, TLS, prefix and key of vLLM's options become the front door's, in vLLM's own spellings."""
    monkeypatch.setenv("VLLM_API_KEY", "env")
    line = "m --uds /u.sock --ssl_certf=c --root-pa /x --api-key= --api-key b c"
    plan = place.plan("--name", "n", "serve", *line.split())
    assert plan.listeners == (UnixAddress("/u.sock"),)
    assert plan.tls == TlsFiles("c", None, None, 0, None, refresh=False)
    assert (plan.name, plan.root_paths, plan.api_key) == ("n", ("/x",), "b")
    assert place.plan("serve", "m").api_key == "env"


def test_serve_reads_vllms_file(place: Place) -> None:
    """Values of vLLM's YAML file count, and lose against the command line."""
    path = place.root / "v.yaml"
    path.write_text("port: 9001\nhost: 127.0.0.1\nserved-model-name: [a]\n")
    assert place.plan("serve", "m", "--config", str(path)).listeners == (TcpAddress("127.0.0.1", 9001),)
    assert place.plan("serve", "m", "--port=9", "--config", str(path)).listeners == (TcpAddress("127.0.0.1", 9),)
    assert place.plan("serve", "m", f"--config={path}").listeners == (TcpAddress("", 8000),)


def test_serve_with_the_stand_in(place: Place) -> None:
    """`--engine mock` needs neither vLLM nor a model, and runs our own Python."""
    plan = place.plan("--engine", "mock", "--set", "engine.command=nothing-here", "serve", "/no/model", "--port", "9")
    assert (plan.kind, plan.name, plan.path_first) == (EngineKind.MOCK, "9", "")
    assert plan.command.argv(SOCKET)[:6] == [sys.executable, "-P", "-m", "vllm_supervisor.mock", "serve", "/no/model"]


def test_serve_over_tcp(place: Place) -> None:
    """`engine.transport = "tcp"` asks for a port instead of a socket."""
    plan = place.plan("--set", "engine.transport=tcp", "serve", "m")
    assert plan.command.transport is Transport.TCP
    assert plan.command.argv(TcpAddress("127.0.0.1", 5))[-4:] == ["--host", "127.0.0.1", "--port", "5"]


@pytest.mark.parametrize("dashes", [["--"], []])
def test_run(place: Place, dashes: list[str]) -> None:
    """`run` starts any program, listens where the configuration says, and leaves the program's own dashes alone."""
    plan = place.plan("--set", "listen.port=9", "run", *dashes, "vllm", "--uds={uds}", "--", "{x}", "-h")
    assert (plan.kind, plan.listeners, plan.options) == (EngineKind.RUN, (TcpAddress("127.0.0.1", 9),), None)
    assert plan.command.argv(SOCKET) == [str(place.vllm), "--uds=/e.sock", "--", "{x}", "-h"]


def test_root_paths_of_serve(place: Place) -> None:
    """The last `--root-path` counts, the command line's before the file's, and the configured one beside it."""
    path = place.root / "v.yaml"
    path.write_text("root-path: /file\n")
    for words, roots in {
        "--root-path /a --root_path=/b": ("/b",),
        "--root-path /a --root-path=": (),
        f"--config {path}": ("/file",),
        f"--root-path=/a --config {path}": ("/a",),
        "": (),
    }.items():
        assert place.plan("serve", "m", *words.split()).root_paths == roots
        both = place.plan("--set", "engine.root_path=/mine", "serve", "m", *words.split()).root_paths
        assert both == ("/mine", *roots)


def test_root_paths_of_run(place: Place) -> None:
    """Every `--root-path` of the command counts, and of a YAML file it names as vLLM's; other files are not ours."""
    path = place.root / "v.yaml"
    for text, roots in {"root_path: /file\n": ("/file",), "- a\n": (), ":\n:": (), "port: 1\n": ()}.items():
        path.write_text(text)
        plan = place.plan("run", "--", "vllm", "{uds}", "--root-path", "/a", "--config", str(path), "--root-path=/b")
        assert plan.root_paths == ("/a", "/b", *roots)
    assert place.plan("run", "--", "vllm", "{uds}", "--config", "/no.yaml").root_paths == ()
    assert place.plan("--set", "engine.root_path=/a", "run", "vllm", "{uds}", "--root-path", "/a").root_paths == ("/a",)


def test_config_file_environment_and_set(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan holds the merged configuration and where each value came from."""
    path = place.root / "c.toml"
    path.write_text('[drain]\nbudget = "1s"\n[log]\nlevel = "error"\n')
    monkeypatch.setenv("VLLM_SUPERVISOR_LOG__LEVEL", "debug")
    plan = place.plan("--config", str(path), "serve", "m")
    assert (plan.config.drain.budget, plan.config.log.level) == (1.0, "debug")
    assert (plan.origins["drain.budget"], plan.origins["log.level"]) == (
        str(path),
        "environment VLLM_SUPERVISOR_LOG__LEVEL",
    )


def test_secrets_are_not_in_a_printed_plan(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A printed plan shows neither keys nor the environment; the command line is redacted by whoever shows it."""
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    assert "hunter2" not in repr(place.plan("--set", "engine.env.HF_TOKEN=hunter2", "serve", "m"))


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("serve m --port x", 2, "--port 'x': expected a whole number"),
        ("serve m --ssl-keyfile k", 2, "--ssl-keyfile needs --ssl-certfile"),
        ("serve m --config /no.yaml", 78, "vLLM's --config /no.yaml: No such file or directory"),
        ("serve /no/model", 78, "model /no/model does not exist"),
        ("serve ./nosuchmodel", 78, "model ./nosuchmodel (in "),
        ("serve m --config x.toml", 2, "--config x.toml after `serve` is vLLM's option"),
        ("serve m --set a=b", 2, "--set after `serve` is for vLLM"),
        ("--engine mock serve m --set a=b", 2, "--set after `serve` is for vLLM"),
        ("--engine mock serve m --name=x", 2, "--name after `serve` is for vLLM"),
        ("--engine mock serve m --config x.toml", 2, "--config x.toml after `serve` is vLLM's option"),
        ("serve m --engine mock", 2, "--engine after `serve` is for vLLM"),
        ("--set engine.command=none serve m", 78, "none is not on PATH; install vLLM, or set engine.command"),
        ("--set engine.command=/none serve m", 78, "/none does not exist; install vLLM"),
        ("--set state_dir=/proc/x serve m", 78, "state directory /proc/x cannot be made"),
        ("--config /no.toml serve m", 78, "--config /no.toml: No such file or directory"),
        ("--set a.b=c serve m", 78, "--set: unknown key a.b"),
        ("--name a/b serve m", 2, "--name a/b: expected up to 40 letters"),
        ("run", 2, "run: no command"),
        ("run -- vllm --port 8000", 2, "run: no argument says where the engine shall listen"),
        ("run -- none {uds}", 78, "none is not on PATH"),
        ("--engine other serve m", 2, "Invalid value for '--engine'"),
        ("--bogus", 2, "No such option '--bogus'. (see `vllm-supervisor --help`)"),
        ("bogus", 2, "No such command 'bogus'."),
        ("", 2, "Missing command."),
    ],
)
def test_mistakes(place: Place, capsys: pytest.CaptureFixture[str], words: str, status: int, told: str) -> None:
    """Each mistake is one line that names it, with its status, nothing carried out, and no traceback."""
    assert place.run(*words.split()) == status
    captured = capsys.readouterr()
    assert captured.err.startswith(f"vllm-supervisor: {told}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert place.plans == []


def test_many_mistakes(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """All mistakes of a configuration are told at once, a line each."""
    assert place.run("--set", "a=1", "--set", "drain.budget=x", "serve", "m") == 78
    assert [line.startswith("vllm-supervisor: --set: ") for line in capsys.readouterr().err.splitlines()] == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    "words", ["serve --help", "serve -h", "serve m --port 9 --help", "serve --help=all", "run --help"]
)
def test_help_is_ours(place: Place, capsys: pytest.CaptureFixture[str], words: str) -> None:
    """A request for help shows ours and starts nothing; that of `serve` says how to see vLLM's."""
    assert place.run(*words.split()) == 0
    assert place.plans == []
    shown = capsys.readouterr().out
    assert "vllm serve --help=all" in shown or words.startswith("run")


def test_help_behind_two_dashes_is_the_engines(place: Place) -> None:
    """What stands behind `--` is never read as ours."""
    assert place.plan("run", "--", "vllm", "{uds}", "--", "--help").command.arguments == ("{uds}", "--", "--help")


@pytest.mark.parametrize(
    ("words", "environ", "option"),
    [
        ("serve M --port 9", {}, "--port"),
        ("run -- vllm {uds}", {}, "listen.port"),
        ("--name mine serve M", {}, ""),
        ("serve M --uds /e.sock", {}, ""),
        ("serve M --headless", {}, ""),
        ("--set state_dir=S serve M", {}, ""),
        ("--set run_dir=S serve M", {}, ""),
        ("serve M", {"STATE_DIRECTORY": "S"}, ""),
    ],
)
def test_what_names_the_instance(
    place: Place, monkeypatch: pytest.MonkeyPatch, words: str, environ: dict[str, str], option: str
) -> None:
    """A plan knows whether another port would give another name and other directories."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.root))
    monkeypatch.setenv("XDG_STATE_HOME", str(place.root))
    for name in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, f"{place.root}/{value}")
    swapped = {
        "M": f"{place.root}/model",
        "state_dir=S": f"state_dir={place.root}/s",
        "run_dir=S": f"run_dir={place.root}/r",
    }
    assert main([swapped.get(word, word) for word in words.split()]) == 0
    assert place.plans.pop().port_option == option


@pytest.mark.parametrize(
    ("variable", "sets", "kept"),
    [
        (None, [], (75.0, 75.0)),
        ("1", [], (1.0, 1.0)),
        ("620", [], (620.0, 620.0)),
        ("0", [], (0.0, 1.0)),  # a new connection needs a moment for its first request
        ("620", ["front_door.idle_timeout=90s"], (620.0, 90.0)),
    ],
)
def test_keep_alive_is_taken_over(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    sets: list[str],
    kept: tuple[float, float],
) -> None:
    """What the user told vLLM of idle connections holds on both sides, unless our own key says otherwise."""
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", variable)
    words = [word for text in sets for word in ("--set", text)]
    plan = place.plan(*words, "serve", f"{place.root}/model")
    assert (plan.engine_keep_alive_s, plan.idle_timeout_s) == kept


def test_keep_alive_of_engine_env_comes_before_the_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """`engine.env` has the last word about what the engine is told, and so about what we assume."""
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "620")
    plan = place.plan("--set", "engine.env.VLLM_HTTP_TIMEOUT_KEEP_ALIVE=10", "serve", f"{place.root}/model")
    assert (plan.engine_keep_alive_s, plan.idle_timeout_s) == (10.0, 10.0)


@pytest.mark.parametrize(("variable", "engine_s"), [(None, 5.0), ("2", 2.0), ("620", 5.0)])
def test_keep_alive_of_another_engine_is_not_known(
    place: Place, monkeypatch: pytest.MonkeyPatch, variable: str | None, engine_s: float
) -> None:
    """Any other engine is taken to keep an idle connection for the 5 s that are common, and never for longer."""
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", variable)
    plan = place.plan("run", "--", str(place.vllm), "{uds}")
    assert (plan.engine_keep_alive_s, plan.idle_timeout_s) == (engine_s, 75.0)


@pytest.mark.parametrize("value", ["", "5s", "-1", "1.5", "x" * 5000, "9" * 5000])
def test_keep_alive_that_is_no_number(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    """A keep-alive time that vLLM could not read ends the command with one line that names the variable."""
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", value)
    assert place.run("serve", f"{place.root}/model") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" in said
    assert len(said) < 200


def test_the_second_underscore_is_missed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan carries the names of variables that were ignored and probably meant, for the log of the start."""
    monkeypatch.setenv("VLLM_SUPERVISOR_DRAIN_BUDGET", "5s")
    (doubt,) = place.plan("serve", "m").doubts
    assert "VLLM_SUPERVISOR_DRAIN__BUDGET was probably meant" in doubt
