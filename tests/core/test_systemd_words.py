"""What systemd prints, read."""

import pytest

from vllm_supervisor.core.systemd_words import command, environment

SHOWN = (
    "{ path=/opt/x/bin/vllm-supervisor ; argv[]=/opt/x/bin/vllm-supervisor --name 8000 serve $SERVE --port ${PORT} ; "
    "ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; pid=0 ; code=(null) ; status=0/0 }"
)


def test_a_command_is_read_with_its_variables() -> None:
    """Both spellings of a variable are filled in, an unknown one is nothing."""
    environ = {"SERVE": "tiny --seed 1", "PORT": "8000"}
    assert command(SHOWN, environ) == "/opt/x/bin/vllm-supervisor --name 8000 serve tiny --seed 1 --port 8000"
    assert command(SHOWN, {}).endswith("serve  --port ")


@pytest.mark.parametrize("text", ["", "n/a", "{ path= }"])
def test_no_command_is_none(text: str) -> None:
    """A unit without ExecStart has no command."""
    assert command(text, {}) == ""


def test_an_environment_file_is_read() -> None:
    """Assignments are taken, quotes removed, comments and other lines passed over."""
    text = '# c\nSERVE=Qwen/X --a 1\n\nKEY="va lue"\n export A=1\n1X=2\nEMPTY=\n'
    assert environment(text) == {"SERVE": "Qwen/X --a 1", "KEY": "va lue", "EMPTY": ""}
