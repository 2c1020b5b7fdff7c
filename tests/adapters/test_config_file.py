"""The two configuration files: ours and vLLM's."""

import os
import subprocess
from pathlib import Path

import pytest

from vllm_supervisor.adapters import config_file, vllm_yaml
from vllm_supervisor.core.errors import ConfigError, SetupError


def test_toml_is_read(tmp_path: Path) -> None:
    """A TOML file comes back as its tables."""
    path = tmp_path / "c.toml"
    path.write_text('release = "ü"\n[drain]\nbudget = "1s"\n')
    assert config_file.read(path) == {"release": "ü", "drain": {"budget": "1s"}}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a = \n", "not valid TOML: .*line 1"),
        (b"\n[x\n", "not valid TOML: .*line 2"),
        (b'a = "\xff"', "byte 5 is not UTF-8"),
    ],
)
def test_bad_toml(tmp_path: Path, content: bytes, told: str) -> None:
    """A file that is no TOML is told with its name and the line."""
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        config_file.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("read", [config_file.read, vllm_yaml.read])
def test_files_that_cannot_be_read(tmp_path: Path, read) -> None:
    """A missing file and a directory are told with their name and status 78."""
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(SetupError, match="name a file that can be read") as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert caught.value.status == 78


@pytest.mark.parametrize("read", [config_file.read, vllm_yaml.read])
def test_what_never_ends_is_refused(tmp_path: Path, read) -> None:
    """A huge file, a pipe that carries more than the bound, and an endless device are told in one line, status 78."""
    (tmp_path / "huge").write_text("#" * (1 << 20) + "\n")
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        pipe = Path(f"/dev/fd/{endless.stdout.fileno()}")
        for path in (tmp_path / "huge", pipe, Path("/dev/full")):
            with pytest.raises(SetupError, match=r"larger than (1 MiB|256 KiB)|is a device") as caught:
                read(path)
            assert caught.value.status == 78
        endless.kill()


def test_a_pipe_is_read() -> None:
    """Process substitution and standard input name pipes; the null device is an empty file."""
    with subprocess.Popen(["echo", 'release = "a"'], stdout=subprocess.PIPE) as source:
        assert source.stdout is not None
        assert config_file.read(Path(f"/dev/fd/{source.stdout.fileno()}")) == {"release": "a"}
    assert config_file.read(Path("/dev/null")) == {}


def test_yaml_is_read(tmp_path: Path) -> None:
    """The YAML file of vLLM comes back as its entries, with their types."""
    path = tmp_path / "c.yaml"
    path.write_text("port: 9\nenable-lora: true\nserved_model_name: [a, b]\nuds: null\n")
    assert vllm_yaml.read(path) == {"port": 9, "enable-lora": True, "served_model_name": ["a", "b"], "uds": None}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a: [1\nb: 2\n", "not valid YAML in line 2"),
        (b"a: !!python/object:os.system x\n", "not valid YAML in line 1"),
        (b"- a\n- b\n", "expected lines of the form"),
        (b"", "expected lines of the form"),
        (b"1: 2\n", "expected lines of the form"),
        (b"a: \xff\n", "is not UTF-8"),
        (b"a: \x01\n", "not valid YAML"),
    ],
)
def test_bad_yaml(tmp_path: Path, content: bytes, told: str) -> None:
    """A file vLLM could not use is told with its name and the line, and nothing in it is carried out."""
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(SetupError, match=told) as caught:
        vllm_yaml.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("read", [config_file.read, vllm_yaml.read])
def test_a_named_pipe_is_refused_at_once(tmp_path: Path, read) -> None:
    """Nobody may ever write into it: it is told, and not waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SetupError, match=r"named pipe; name a file|a device or a pipe; name a file"):
        read(tmp_path / "pipe")


def test_an_open_pipe_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds a pipe open and writes nothing does not keep a start waiting."""
    monkeypatch.setattr(config_file, "PATIENCE", 0.05)
    mine, theirs = os.pipe()
    with pytest.raises(ConfigError, match="the pipe did not end within"):
        config_file.read(Path(f"/dev/fd/{mine}"))
    os.close(mine)
    os.close(theirs)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a = " + b"[" * 20_000, "nested too deeply"),
        (b"a = " + b"[" * 20_000 + b"]" * 20_000, "nested too deeply"),
        (b"a = " + b"{a=" * 20_000, "nested too deeply"),
        (b"a = " + b"9" * 5_000, "not valid TOML"),
        (b"a = \x00", "not valid TOML"),
        (b'a = "\x00"', "not valid TOML"),
        (b"\xff\xfea\x00", "byte 0 is not UTF-8"),
    ],
)
def test_hostile_toml(tmp_path: Path, content: bytes, told: str) -> None:
    """What the parser gives up on is one short line."""
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        config_file.read(tmp_path / "c.toml")
    assert len(str(caught.value)) < 500


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    (tmp_path / "c").write_bytes(b'\xef\xbb\xbfrelease = "a"')
    assert config_file.read(tmp_path / "c") == {"release": "a"}
    (tmp_path / "c").write_bytes(b"\xef\xbb\xbfport: 9")
    assert vllm_yaml.read(tmp_path / "c") == {"port": 9}


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a: " + "[" * 20_000, "nested too deeply"),
        ("a: " + "{a: " * 20_000, "nested too deeply"),
        (LAUGHS, "more than a few aliases"),
        (MERGES, "more than a few aliases"),
        ("a: &a [*a]\nb: " + "[" * 60, "nested too deeply"),
        ("a: " + "9" * 5_000, "a value cannot be read"),
        ("a: !!bool x", "a value cannot be read"),
        ("a: !!int ''", "a value cannot be read"),
        ("a: !!timestamp x", "a value cannot be read"),
        ("a: 2026-99-99", "a value cannot be read"),
        ("a: \x00", "not valid YAML"),
        ("? [a]\n: b", "not valid YAML"),
    ],
)
def test_hostile_yaml(tmp_path: Path, content: str, told: str) -> None:
    """Depth, aliases that double at each level and values of another tag are one short line each."""
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(SetupError, match=told) as caught:
        vllm_yaml.read(tmp_path / "c.yaml")
    assert len(str(caught.value)) < 500
