"""Units that somebody else wrote, read with what they refer to."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_supervisor.adapters import old_unit
from vllm_supervisor.cli.main import main
from vllm_supervisor.core.errors import SetupError


def silent(_words: Sequence[str]) -> str:
    """Be a systemd that does not answer."""
    raise subprocess.CalledProcessError(1, "systemctl")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Give a unit's file with a drop-in and an environment file."""
    (tmp_path / "env").write_text("PORT=9\n")
    path = tmp_path / "vllm.service"
    path.write_text(f"[Service]\nEnvironmentFile=-{tmp_path}/env\nExecStart=/v/bin/vllm serve m --port $PORT\n")
    (tmp_path / "vllm.service.d").mkdir()
    (tmp_path / "vllm.service.d" / "a.conf").write_text("[Service]\nUser=no-such-user\n")
    return path


def test_a_path_is_read_with_what_stands_beside_it(unit: Path) -> None:
    """File, drop-ins, environment files, and the homes of its users as far as this machine knows them."""
    found = old_unit.read(str(unit), silent)
    assert (found.name, len(found.texts)) == ("vllm.service", 2)
    assert found.files == {f"{unit.parent}/env": {"PORT": "9"}}
    assert set(found.homes) == {"root"}


def test_a_name_is_asked_of_systemd() -> None:
    """`systemctl cat` gives file and drop-ins in one text; `.service` may be left out."""
    asked: list[Sequence[str]] = []

    def ask(words: Sequence[str]) -> str:
        asked.append(words)
        return "# /etc/systemd/system/vllm.service\n[Service]\nExecStart=/v/bin/vllm serve m\n"

    assert old_unit.read("vllm", ask).name == "vllm.service"
    assert asked == [["cat", "--", "vllm.service"]]


def test_what_is_not_there_is_told() -> None:
    """A name nobody knows, and a path that leads nowhere."""
    for name in ("no-such-unit-of-ours.service", "/no/such.service"):
        with pytest.raises(SetupError, match="there is no such unit"):
            old_unit.read(name, silent)


def test_the_command_prints_a_script(unit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`doctor --migrate FILE` prints it and ends with 1, because the user's home is not known; --json has the parts."""
    assert main(["doctor", "--migrate", str(unit)]) == 1
    script = capsys.readouterr().out
    assert "systemctl enable --now vllm-supervisor@9.service" in script
    assert "SERVE=m\n" in script
    assert main(["doctor", "--json", "--migrate", str(unit)]) == 1
    assert '"instance": "9"' in capsys.readouterr().out
