"""The scripts of a clone: their errors are one line with the mend, and what they make is what vLLM needs."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end with `env` added to ours."""
    return subprocess.run(
        [str(word) for word in argv],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Give a clone without its environment: the scripts and the project file."""
    shutil.copytree(ROOT / "scripts", tmp_path / "clone" / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "clone")
    return tmp_path / "clone"


def old_python(folder: Path) -> Path:
    """Write a program that says it is Python 3.9.2."""
    program = folder / "python3"
    program.write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.9.2 ;; *) exit 1 ;; esac\n', encoding="utf-8")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("script", ["run", "test", "check"])
def test_a_python_that_is_too_old_is_named_with_what_is_needed(script: str, clone: Path, tmp_path: Path) -> None:
    """Each command that sets up the environment ends with 78 and one line: what it needs, what it found."""
    old = old_python(tmp_path)
    done = run(clone / "scripts" / script, PYTHON=str(old))
    assert done.returncode == 78
    assert done.stderr.splitlines() == [
        f"venv: this needs Python 3.11 or newer (PYTHON=/path/to/python3 names one); found: {old} is 3.9.2"
    ]
    assert not (clone / ".venv").exists()


def test_vllm_for_the_cpu_says_which_python_it_needs(tmp_path: Path) -> None:
    """Without Python 3.11 the installation of vLLM ends with 78 and one line, before anything is written."""
    old = old_python(tmp_path)
    done = run(ROOT / "scripts" / "install-vllm-cpu", VLLM_PYTHON=str(old), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 78
    assert len(done.stderr.splitlines()) == 1
    assert "Python 3.11" in done.stderr
    assert "3.9.2" in done.stderr
    assert not list(tmp_path.glob("cache/*/*/venv"))


def test_an_unreachable_package_index_is_one_line(clone: Path) -> None:
    """Without a network the last line says that the index cannot be reached, and nothing counts as installed."""
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}
    done = run(clone / "scripts" / "venv", **nowhere, PIP_RETRIES="0", PIP_FIND_LINKS="")
    assert done.returncode == 78
    assert "the package index cannot be reached" in done.stderr.splitlines()[-1]
    assert not list(clone.glob(".venv/installed-*"))


def test_every_token_of_the_tiny_models_vocabulary_is_text(tmp_path: Path) -> None:
    """The tokenizer has exactly as many tokens as the model, so no random output lacks a text."""
    done = run(ROOT / "scripts" / "make-tiny-model", tmp_path / "model")
    assert done.stdout == f"{tmp_path / 'model'}\n"
    size = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text(encoding="utf-8"))
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(size))


def test_the_model_script_names_a_folder_it_cannot_write(tmp_path: Path) -> None:
    """A folder below a plain file cannot be made by anyone: 78 and one line that names it."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    done = run(ROOT / "scripts" / "make-tiny-model", tmp_path / "file" / "model")
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "file" / "model") in done.stderr
