"""Old units, as people write them, under vllm-supervisor: nothing is dropped in silence, and no secret is printed."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_supervisor.core.migrate import COMMAND, Migration, OldUnit, migrate, render, settings
from vllm_supervisor.core.vllm_words import without

HOMES = {"root": "/root", "llm": "/home/llm"}


def unit(service: str, *drop_ins: str, **files: dict[str, str]) -> OldUnit:
    """Give a unit of the user llm with these lines in [Service]."""
    text = f"[Unit]\nAfter=network.target\n[Service]\nUser=llm\n{service}\n[Install]\nWantedBy=multi-user.target\n"
    return OldUnit(
        "vllm.service", (text, *drop_ins), files={f"/etc/{name}": value for name, value in files.items()}, homes=HOMES
    )


def translated(service: str, *drop_ins: str, **files: dict[str, str]) -> Migration:
    """Translate such a unit."""
    return migrate(unit(service, *drop_ins, **files))


# ExecStart of the old unit: what is served, on which port, by which vLLM, and whether a person must do something.
COMMANDS = [
    ("/opt/vllm/bin/vllm serve m --port 9", "m", "9", "/opt/vllm/bin/vllm", False),
    ("/opt/vllm/bin/vllm serve m", "m", "8000", "/opt/vllm/bin/vllm", False),
    ("-/opt/vllm/bin/vllm serve --port=9 m --dtype half", "m --dtype half", "9", "/opt/vllm/bin/vllm", False),
    ("/v/bin/vllm serve m --api_server_c 2 \\\n    --por 9 \\\n    --served-model-name a b", "m --api_server_c 2 --served-model-name a b", "9", "/v/bin/vllm", False),
    ("/v/bin/python3 -m vllm.entrypoints.openai.api_server --model m --served-model-name m --port 9", "m --served-model-name m", "9", "/v/bin/vllm", False),
    ("/v/bin/python -m vllm.entrypoints.cli.main serve m", "m", "8000", "/v/bin/vllm", False),
    ("/usr/bin/env CUDA_VISIBLE_DEVICES=1 /v/bin/vllm serve m", "m", "8000", "/v/bin/vllm", False),
    ("/bin/bash -c 'source /v/bin/activate && vllm serve m --port 9'", "m", "9", "/v/bin/vllm", False),
    ("/bin/bash -c '. /v/bin/activate; export A=1; cd /srv; exec vllm serve m 2>&1 >> /tmp/x.log'", "m", "8000", "/v/bin/vllm", False),
    ('/bin/sh -c "exec /v/bin/vllm serve m"', "m", "8000", "/v/bin/vllm", False),
    ("/bin/bash -lc 'conda activate vllm && vllm serve m'", "m", "8000", "", True),
    ("/bin/bash -c 'while true; do /v/bin/vllm serve m; sleep 5; done'", None, "8000", "", True),
    ("/bin/bash -c '/v/bin/vllm serve m | tee /tmp/log'", "m | tee /tmp/log", "8000", "/v/bin/vllm", True),
    ("/usr/bin/nohup /v/bin/vllm serve m", "m", "8000", "/v/bin/vllm", False),
    ("/usr/bin/numactl --membind=0 /v/bin/vllm serve m", "m", "8000", "/v/bin/vllm", True),
    ("/v/bin/vllm serve $MODEL --port ${PORT} $MORE", "org/m --port 9 --dtype half".replace(" --port 9", ""), "9", "/v/bin/vllm", False),
    ("/v/bin/vllm serve ${UNKNOWN}", "${UNKNOWN}", "8000", "/v/bin/vllm", True),
    ("/usr/bin/vllm serve m --uds /run/x.sock", "m --uds /run/x.sock", "8000", "/usr/bin/vllm", False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "serve", "port", "engine", "by_hand"), COMMANDS, ids=[row[0][:60] for row in COMMANDS]
)
def test_command_lines(line: str, serve: str | None, port: str, engine: str, *, by_hand: bool) -> None:
    """Each way to start vLLM becomes what follows `serve`; what cannot be seen is said."""
    made = translated(
        f"EnvironmentFile=/etc/e\nExecStart={line}", e={"MODEL": "org/m", "PORT": "9", "MORE": "--dtype half"}
    )
    assert (made.instance, made.environment.get("VLLM_SUPERVISOR_ENGINE__COMMAND", "")) == (port, engine)
    assert made.serve == ([] if serve is None else serve.split())
    assert bool(made.hands or made.problem) is by_hand, (made.hands, made.problem)


def test_the_user_the_home_and_the_weights_stay() -> None:
    """The new unit runs as the old one did, finds the weights where they are, and may write their locks."""
    made = translated("Group=gpu\nExecStart=/v/bin/vllm serve m")
    assert made.drop_in[:5] == [
        "DynamicUser=no",
        "User=llm",
        "Group=gpu",
        "Environment=HOME=/home/llm",
        "ReadWritePaths=-/home/llm/.cache",
    ]
    made = translated("Environment=HF_HOME=/data/hf HOME=/srv\nExecStart=/v/bin/vllm serve m")
    assert made.environment["HF_HOME"] == "/data/hf"
    assert {"Environment=HOME=/srv", "ReadWritePaths=-/data/hf"} <= set(made.drop_in)


def test_no_secret_is_printed() -> None:
    """Keys are named, left empty in the environment file, and nowhere in the text."""
    old = unit('Environment="HF_TOKEN=hunter2" A=1\nExecStart=/v/bin/vllm serve m --api-key hunter2 --port 9')
    made = migrate(old)
    assert made.environment["HF_TOKEN"] == made.environment["VLLM_API_KEY"] == ""
    assert "hunter2" not in render(old, made)
    assert (made.status, len(made.hands)) == (1, 2)
    assert "exit 1  # take this line out" in render(old, made)


def test_a_word_that_needs_quotes_gets_a_command_line_of_its_own() -> None:
    """JSON survives systemd's quoting, and % and $ are doubled; the variable SERVE is not used then."""
    made = translated("""ExecStart=/v/bin/vllm serve m --override-generation-config '{"a": "5%% $$x"}'""")
    assert made.drop_in[0] == "ExecStart="
    assert made.drop_in[1] == (
        f'ExecStart={COMMAND} --name %i serve m --override-generation-config "{{\\"a\\": \\"5%% $$x\\"}}" --port %i'
    )
    assert "SERVE=" not in render(unit(""), made)


@pytest.mark.parametrize(
    ("line", "kept", "noted"),
    [
        ("Restart=always", False, "the supervisor restarts the engine"),
        ("KillMode=control-group", False, "TERM must reach the supervisor alone"),
        ("TimeoutStopSec=10", False, "drain.budget"),
        ("ExecStop=/bin/kill -TERM $MAINPID", False, "a second signal would cut it short"),
        ("ExecStartPre=/usr/bin/pkill -9 -f vllm", False, "by pid alone"),
        ("ExecStartPre=/bin/sleep 30", False, "waits for memory"),
        ("ExecStartPre=/usr/bin/nvidia-smi", True, ""),
        ("LimitMEMLOCK=infinity", True, ""),
        ("CPUAffinity=0-7", True, ""),
        ("SupplementaryGroups=video", True, ""),
        ("WorkingDirectory=/srv/llm", True, ""),
    ],
)
def test_every_setting_is_carried_over_or_told(line: str, kept: bool, noted: str) -> None:
    """What the shipped unit has its own of is left out with the reason; the rest stays as it is."""
    made = translated(f"{line}\nExecStart=/v/bin/vllm serve m")
    assert (line in made.drop_in) is kept
    assert any(noted in note and line.partition("=")[0] in note for note in made.notes) is bool(noted)
    assert "After=network.target" in made.unit_section


def test_drop_ins_count_and_an_empty_value_takes_back() -> None:
    """The last ExecStart is the one; lists grow until they are emptied."""
    found = settings(
        ["[Service]\nEnvironment=A=1\nExecStart=/x\n", "[Service]\nExecStart=\nExecStart=/y\nEnvironment=B=2\n"]
    )
    assert [value for _, value in found["ExecStart"]] == ["/y"]
    assert [value for _, value in found["Environment"]] == ["A=1", "B=2"]
    made = translated("ExecStart=/v/bin/vllm serve old", "[Service]\nExecStart=\nExecStart=/v/bin/vllm serve new\n")
    assert made.serve == ["new"]


CONTAINER = (
    "ExecStart=/usr/bin/docker run --rm --gpus all --name llm --restart always -p 8000:8000 -e HF_TOKEN=hunter2 "
    "-v /data:/root/.cache --ipc=host vllm/vllm-openai:latest --model m --max-model-len 8192"
)


def test_a_container_is_shown_its_new_command() -> None:
    """The unit cannot be translated, which is said with the page; its command is, without what the image has its own of."""
    old = unit(CONTAINER)
    made = migrate(old)
    assert made.status == 2
    assert "docs/containers.md" in made.problem
    assert made.container == [
        "/usr/bin/docker", "run", "--stop-timeout", "120", "--rm", "--gpus", "all", "--name", "llm", "-p", "8000:8000",
        "--env", "HF_TOKEN", "-v", "/data:/root/.cache", "--ipc=host", "YOUR-IMAGE-WITH-SUPERVISOR", "--model", "m",
        "--max-model-len", "8192",
    ]  # fmt: skip
    assert "hunter2" not in render(old, made)
    assert "systemctl" not in render(old, made)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ExecStart=/usr/bin/python3 -m http.server",
        "ExecStart=/opt/start.sh",
        "ExecStart=/v/bin/vllm serve m --port x",
    ],
)
def test_what_cannot_be_translated_says_so(line: str) -> None:
    """Status 2, a reason, and no commands."""
    made = translated(line)
    assert (made.status, bool(made.problem)) == (2, True)
    assert "systemctl enable" not in render(unit(line), made)


def test_the_text_is_a_script_with_the_way_back(tmp_path: Path) -> None:
    """A shell can read it; rivals are switched off before the change and named again for the way back."""
    old = replace(
        unit("ExecStart=/v/bin/vllm serve m --port 9"),
        rivals=(
            ("/etc/cron.d/llm (cron) can do `systemctl restart`", ""),
            ("dog.service pings", "dog.timer"),
        ),
    )
    text = render(old, migrate(old))
    (tmp_path / "x.sh").write_text(text)
    shell = shutil.which("sh")
    assert shell
    subprocess.run([shell, "-n", str(tmp_path / "x.sh")], check=True)
    order = [
        text.index(part)
        for part in ("disable --now dog.timer", "disable --now vllm.service", "enable --now vllm-supervisor@9")
    ]
    assert order == sorted(order)
    back = text[text.index("# The way back") :]
    assert "enable --now vllm.service" in back
    assert "enable --now dog.timer" in back
    assert "do it yourself: take it out" in text


def test_options_are_taken_out_wherever_they_stand() -> None:
    """With their values, in each spelling, and the model with them."""
    words = ["--port", "9", "m", "--x.y", "1", "--por=8", "--served-model-name", "a", "b", "--", "z"]
    assert without(words, ["--port"], model=True) == (
        ["--x.y", "1", "--served-model-name", "a", "b", "--", "z"],
        {"--port", "--served-model-name"},
    )
